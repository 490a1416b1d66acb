"""``make demo``: two machines on one, four ranks, one training run over the fabric and one over Gloo.

Two runtime directories make two peers, as two machines would have; each has two ranks. The ranks train
``examples/train_ddp.py`` on the UCI digits; while they do, both peers are asked again and again in which
order they observed the contributions of their ops. Then the same with Gloo. Exit code 1 where ranks end
with different parameters or the held-out losses differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from frogzmq.bench.launch import RankFailed, Ranks
from frogzmq.bench.peers import PeerView
from frogzmq.bench.spec import Layout

LAYOUT = Layout(ranks=4, peers=2)
TOLERANCE = 1e-4
DEADLINE_S = 300.0
ORDERS_SHOWN = 3
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_ddp.py"


@dataclass
class Observed:
    """Which contributions each machine saw in which order, op by op, as far as the looks caught them."""

    ops: dict[tuple[int, str, int], tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """(machine, group, op number) -> ranks of each contribution, in the order of observation."""
    mode: str = ""

    def look(self, machine: int, snapshot: dict[str, Any]) -> None:
        """Take in one snapshot of a machine's peer."""
        for group in snapshot.get("groups", []):
            self.mode = f"{group.get('mode', '?')}, order {group.get('order', '?')}"
            for op in [*group.get("recent", []), *group.get("ops", [])]:
                ranks = tuple(tuple(row["ranks"]) for row in op.get("observed", []))
                # Only reductions: in them every rank contributes.
                if "reduce" in str(op.get("what", "")) and sum(map(len, ranks)) == LAYOUT.ranks:
                    self.ops[machine, str(group.get("gid")), int(op["seq"])] = ranks

    def orders(self, machine: int) -> list[tuple[str, int]]:
        """Distinct orders on a machine, the most frequent first, with how many ops showed each."""
        counted = Counter(_order_text(order) for (where, _, _), order in self.ops.items() if where == machine)
        return counted.most_common()


def _order_text(order: tuple[tuple[int, ...], ...]) -> str:
    return " > ".join("+".join(map(str, ranks)) for ranks in order)


@dataclass
class Run:
    """How one backend's run ended."""

    backend: str
    mode: str
    wall_s: float
    outcomes: list[dict[str, Any]]
    """What each rank wrote, by rank."""
    observed: Observed | None = None

    @property
    def hashes(self) -> list[str]:
        """Hash of each rank's own parameters."""
        return [str(outcome["parameter_hash"]) for outcome in self.outcomes]

    @property
    def losses(self) -> list[float]:
        """Held-out loss as each rank has it."""
        return [float(outcome["held_out_loss"]) for outcome in self.outcomes]


def train(console: Console, backend: str, epochs: int, folder: Path) -> Run:
    """One run of the example with ``backend`` on all ranks; ``RankFailed`` where one fails."""
    out = folder / f"{backend}-{{rank}}.json"
    command = [
        sys.executable,
        str(EXAMPLE),
        "--backend",
        backend,
        "--epochs",
        str(epochs),
        "--json",
        str(out),
    ]
    observed = Observed() if backend == "frogzmq" else None
    began = time.monotonic()
    status = console.status(f"{backend}: starting {LAYOUT.describe()}")

    def on_line(rank: int, line: str) -> None:
        if line.startswith("epoch "):
            status.update(f"{backend}: {line}")
            if not console.is_terminal or line.split()[1].startswith(("1/", f"{epochs}/")):
                console.print(f"  {backend:8} {line}", highlight=False, markup=False)
        elif rank != 0 or "arn" in line:
            console.print(f"  {backend:8} rank {rank}: {line}", style="dim", highlight=False, markup=False)

    with status, Ranks(LAYOUT, command, on_line=on_line) as ranks:

        def look() -> None:
            views: list[tuple[int, PeerView]] = ranks.peers()
            for machine, view in views:
                if observed is not None:
                    observed.look(machine, view.snapshot)

        ranks.wait(DEADLINE_S, poll=look if observed is not None else None, every_s=0.05)
    wall = time.monotonic() - began
    files = [Path(str(out).replace("{rank}", str(rank))) for rank in range(LAYOUT.ranks)]
    mode = observed.mode if observed is not None else "ring"
    return Run(backend, mode, wall, [json.loads(path.read_text()) for path in files], observed)


def table_of(runs: list[Run]) -> Table:
    """Runs side by side."""
    table = Table(title="UCI digits, 4 ranks on 2 machines", title_justify="left", show_lines=False)
    table.add_column("", style="bold")
    for run in runs:
        table.add_column(run.backend)
    table.add_row("mode", *(run.mode for run in runs))
    table.add_row("training", *(f"{max(o['elapsed_s'] for o in run.outcomes):.2f} s" for run in runs))
    table.add_row("with start-up", *(f"{run.wall_s:.1f} s" for run in runs))
    table.add_row("held-out loss", *(f"{run.losses[0]:.8f}" for run in runs))
    table.add_row("accuracy", *(f"{run.outcomes[0]['accuracy']:.4f}" for run in runs), end_section=True)
    for rank in range(LAYOUT.ranks):
        table.add_row(f"parameters of rank {rank}", *(run.hashes[rank][:16] for run in runs))
    table.rows[-1].end_section = True
    for machine in range(LAYOUT.peers):
        ranks = "+".join(map(str, LAYOUT.ranks_of(machine)))
        label = f"machine {machine} (ranks {ranks})\nobserved, in order"
        table.add_row(label, *(_orders_text(run, machine) for run in runs))
    return table


def _orders_text(run: Run, machine: int) -> str:
    if run.observed is None:
        return "fixed by the ring"
    orders = run.observed.orders(machine)
    total = sum(count for _, count in orders)
    lines = [f"{text:14} {count} of {total} ops" for text, count in orders[:ORDERS_SHOWN]]
    if len(orders) > ORDERS_SHOWN:
        rest = sum(count for _, count in orders[ORDERS_SHOWN:])
        lines.append(f"{'other orders':14} {rest} of {total} ops")
    return "\n".join(lines) or "no op was caught by a look"


def verdict(runs: list[Run]) -> list[str]:
    """What is wrong; empty where all is well."""
    wrong: list[str] = []
    for run in runs:
        if len(set(run.hashes)) != 1:
            each = ", ".join(f"rank {rank} {digest[:16]}" for rank, digest in enumerate(run.hashes))
            wrong.append(f"{run.backend}: ranks ended with different parameters: {each}")
        if len(set(run.losses)) != 1:
            wrong.append(f"{run.backend}: ranks got different held-out losses: {run.losses}")
    losses = {run.backend: run.losses[0] for run in runs}
    spread = max(losses.values()) - min(losses.values())
    if not spread <= TOLERANCE:  # also where it is not a number
        each = ", ".join(f"{name} {loss:.8f}" for name, loss in losses.items())
        wrong.append(f"held-out losses differ by {spread:.2e}, allowed are {TOLERANCE:g}: {each}")
    return wrong


def main() -> int:
    """Run both, print the table, say whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--backends", default="frogzmq,gloo", help="which to run, in this order")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the caller started us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    console = Console(soft_wrap=False)
    runs: list[Run] = []
    try:
        with tempfile.TemporaryDirectory(prefix="frogzmq-demo-") as folder:
            for backend in args.backends.split(","):
                console.print(f"[bold]{backend}[/]: {args.epochs} epochs on {LAYOUT.describe()}")
                runs.append(train(console, backend, args.epochs, Path(folder)))
    except RankFailed as error:
        console.print(f"demo failed: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes of the demo have ended")
        return 130
    console.print(table_of(runs))
    wrong = verdict(runs)
    for text in wrong:
        console.print(f"FAILED: {text}", style="red", markup=False, highlight=False)
    if not wrong:
        text = f"all ranks hold the same parameters; held-out losses agree within {TOLERANCE:g}"
        console.print(text, style="green", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
