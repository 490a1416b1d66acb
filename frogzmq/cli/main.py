"""The commands: each parses its arguments, calls one function, and turns an error into one line.

Exit codes: 0 done, 1 receipts differ, 2 the command could not do what was asked (one line on stderr says
why), 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import frogzmq
from frogzmq.config import locate_runtime_dir, unknown_variables
from frogzmq.errors import ConfigError, FrogError

COULD_NOT = 2
DIFFERENT = 1
INTERRUPTED = 130


class Commands(TyperGroup):
    """The command group: what is raised on purpose becomes one line, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; ``FrogError`` ends it with code 2."""
        try:
            return super().invoke(ctx)
        except FrogError as error:
            print(f"frogzmq: {error}", file=sys.stderr)
            raise typer.Exit(COULD_NOT) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # `frogzmq peek | head`: the reader has what it wanted. Nothing may be flushed to it at exit.
            sys.stdout = None
            raise typer.Exit(0) from None


app = typer.Typer(
    cls=Commands,
    name="frogzmq",
    help="A torch.distributed backend over a ZeroMQ gossip fabric.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings (TOML). Default: FROGZMQ_CONFIG.")
]
RuntimeDir = Annotated[
    Path | None,
    typer.Option("--runtime-dir", metavar="DIR", help="The peer's folder. Default: FROGZMQ_RUNTIME_DIR."),
]


@app.command()
def peer(
    config: ConfigFile = None,
    runtime: RuntimeDir = None,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="End with the last job.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the running peer instead.")] = False,
) -> None:
    """Run this machine's peer in the foreground, or stop the one that runs."""
    if stop:
        if config is not None or ephemeral:
            raise ConfigError("--stop goes with --runtime-dir only")
        _tell_unknown_variables()
        _stop(locate_runtime_dir(explicit=runtime)[0])
        return
    from frogzmq.daemon.main import run

    raise typer.Exit(run(config, ephemeral=ephemeral, directory=runtime))


@app.command()
def peek(
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON: indented, or a line per look.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between two looks.")] = 0.5,
    runtime: RuntimeDir = None,
    receipts: Annotated[bool, typer.Option("--receipts", help="Show the receipts that peers keep.")] = False,
    peers: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="With --receipts: folders of peers, which are compared."),
    ] = None,
) -> None:
    """Show a peer's live state: machines, jobs, ops in flight and whose contributions have arrived.

    With --receipts: what was folded into what, op by op; ends with code 1 where machines or ranks differ.
    """
    from frogzmq.cli.peek import peek as show

    _tell_unknown_variables()
    if receipts:
        from frogzmq.cli.receipts import show_receipts

        found = show_receipts(peers or [locate_runtime_dir(explicit=runtime)[0]], as_json=as_json)
        raise typer.Exit(DIFFERENT if found else 0)
    if peers:
        raise ConfigError("folders of several peers go with --receipts only; use --runtime-dir DIR")
    directory = locate_runtime_dir(explicit=runtime)[0]
    show(directory, once=once, as_json=as_json, interval_s=interval)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(ctx: typer.Context) -> None:
    """Compare frogzmq with Gloo on this machine (`frogzmq bench --help` lists the options)."""
    from frogzmq.bench.main import app as command

    command(args=ctx.args, prog_name="frogzmq bench")


@app.command()
def version() -> None:
    """Print the release and the protocol that it speaks."""
    from frogzmq.wire.messages import PROTOCOL

    print(f"frogzmq {frogzmq.__version__} (protocol {PROTOCOL})")


def _tell_unknown_variables() -> None:
    for text in unknown_variables():
        print(f"frogzmq: warning: {text}", file=sys.stderr)


def _stop(directory: Path) -> None:
    from frogzmq.cli.ask import Peer

    with Peer(directory) as running:
        running.stop()
        print(f"stopped peer {running.welcome.who.name} (pid {running.welcome.pid})")


if __name__ == "__main__":
    app()
