"""``frogzmq bench``, ``make bench``, ``python -m frogzmq.bench``: the command."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from frogzmq.bench import report
from frogzmq.bench.collect import Outcome, run_layout
from frogzmq.bench.spec import COLLECTIVES, COLLECTIVES_SIZE, SIZES, Layout, Spec, format_size, parse_size
from frogzmq.errors import FrogError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_STARTING_S = 60.0
"""Allowed for processes to start and to end."""


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: write numbers separated by commas, such as 2,4", param_hint=option
        ) from None


def make_spec(sizes: str, seconds: float, backends: str, collectives: bool = False) -> Spec:
    """Read the options that all layouts share; ``typer.BadParameter`` says which one is wrong and why."""
    usual = (COLLECTIVES_SIZE,) if collectives else SIZES
    try:
        wanted = tuple(parse_size(item) for item in sizes.split(",")) if sizes else usual
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes") from None
    names = tuple(name.strip() for name in backends.split(","))
    if len(names) < 2 or not all(names):
        raise typer.BadParameter(
            f"{backends!r}: name two backends, such as gloo,frogzmq", param_hint="--backends"
        )
    if not 0 < seconds <= 3600:
        raise typer.BadParameter(f"{seconds}: must be above 0 and at most 3600", param_hint="--seconds")
    which = COLLECTIVES if collectives else ("all_reduce",)
    return Spec(0, 0, names, wanted, seconds, block_s=min(0.4, seconds / 8), collectives=which)


def make_layouts(ranks: str, peers: str) -> list[Layout]:
    """Every number of ranks on every number of peers that it can be spread over."""
    try:
        pairs = [(r, p) for p in _numbers(peers, "--peers") for r in _numbers(ranks, "--ranks")]
        layouts = [Layout(r, p) for r, p in pairs if r >= p or min(r, p) < 1]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ranks/--peers") from None
    if not layouts:
        raise typer.BadParameter(
            f"{ranks} rank(s) cannot be spread over {peers} peer(s)", param_hint="--ranks/--peers"
        )
    return layouts


def check_parts(spec: Spec, layouts: list[Layout]) -> None:
    """Where ranks give or get parts, a size must divide into them; ``typer.BadParameter`` if not."""
    if spec.collectives == ("all_reduce",):
        return
    for nbytes in spec.sizes:
        for layout in layouts:
            if nbytes % (4 * layout.ranks):
                raise typer.BadParameter(
                    f"{nbytes} bytes of float32 cannot be dealt out evenly to {layout.ranks} ranks: "
                    f"with --collectives write a multiple of {4 * layout.ranks}",
                    param_hint="--sizes",
                )


@app.command()
def bench(
    sizes: Annotated[str, typer.Option(help="Tensor sizes; 4,4k,256k,4M,64M unless given.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; 2,4 unless given.")] = "",
    peers: Annotated[
        str, typer.Option(help="Numbers of peers, each standing for a machine; 1,2 unless given.")
    ] = "",
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="all_reduce, broadcast, reduce, all_gather, gather, scatter, reduce_scatter and "
            "all_to_all side by side; 64M, 4 ranks, 1 peer unless given.",
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time per size and layout, all backends together.")] = 8.0,
    quick: Annotated[bool, typer.Option("--quick", help="One second per size, for a first look.")] = False,
    backends: Annotated[str, typer.Option(help="Who takes turns; ratios are to the first.")] = "gloo,frogzmq",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
) -> None:
    """Measure all_reduce (or all collectives) of frogzmq and Gloo, alternating in one run on this machine."""
    spec = make_spec(sizes, 1.0 if quick else seconds, backends, collectives)
    layouts = make_layouts(ranks or ("4" if collectives else "2,4"), peers or ("1" if collectives else "1,2"))
    check_parts(spec, layouts)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the caller started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    console = Console()
    began = time.monotonic()
    try:
        micro = _micro(quick)
        outcomes = _run_all(console, spec, layouts)
    except FrogError as error:
        console.print(f"bench failed: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted; all processes of the run have ended")
        raise typer.Exit(130) from None
    elapsed = time.monotonic() - began
    report.show(console, outcomes, micro, elapsed)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(spec, outcomes, micro, elapsed), indent=1) + "\n")
        console.print(f"wrote {json_file}")


def _micro(quick: bool) -> dict[str, float]:
    from frogzmq.bench.micro import micro

    return micro(0.05 if quick else 0.3)


def _run_all(console: Console, spec: Spec, layouts: list[Layout]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    # Besides its turns every cell has warm-up, checks and set-up of the tensors.
    deadline = _STARTING_S + len(spec.cells()) * (2 * spec.seconds + 30)
    with console.status("") as status:
        for number, layout in enumerate(layouts, 1):
            title = f"layout {number}/{len(layouts)}, {layout.describe()}"
            status.update(f"{title}: starting")
            mine = replace(spec, ranks=layout.ranks, peers=layout.peers)
            outcomes.append(run_layout(layout, mine, deadline, _teller(console, status, title)))
    return outcomes


class _teller:
    """Shows how far a layout is: a live line in a terminal, a line per cell elsewhere."""

    def __init__(self, console: Console, status: Status, title: str) -> None:
        self.console, self.status, self.title = console, status, title
        self.said = ("", 0)

    def __call__(self, collective: str, nbytes: int, share: float, turns: int) -> None:
        text = f"{self.title}: {collective} of {format_size(nbytes)} {share:.0%}, {turns} turns each"
        self.status.update(text)
        if not self.console.is_terminal and share >= 1 and (collective, nbytes) != self.said:
            self.said = (collective, nbytes)
            self.console.print(text)


def main() -> None:
    """Entry point of ``python -m frogzmq.bench``."""
    app()


if __name__ == "__main__":
    main()
