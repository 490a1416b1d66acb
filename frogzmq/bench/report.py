"""The table that people read, and the JSON that scripts read."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from frogzmq import __version__
from frogzmq.bench.collect import Outcome
from frogzmq.bench.measure import ratio
from frogzmq.bench.spec import Spec, format_size

NOTES = (
    "time: median over iterations of the slowest rank (10th to 90th percentile); "
    "ratio: the first backend's time by this one's, above 1 this one is faster",
    "sent/host: bytes to the other machine per op, largest host; frogzmq: peers' counters; "
    "others: TCP sockets of the ranks (the kernel's count)",
    "CPU: seconds of all ranks, and of frogzmq's peers, per 1e9 bytes of tensor",
    "memory: peak beyond the tensors and what was there before any; for frogzmq with peers and arena. "
    "Backends share the ranks' processes, so what one keeps there counts for the other too; what a peer "
    "keeps in the arena for the next op counts in the rows below",
)


def layout_table(outcome: Outcome) -> Table:
    """One layout: a row per collective, size and backend."""
    collectives = {collective for collective, _ in outcome.cells}
    sizes = {nbytes for _, nbytes in outcome.cells}
    # A column where rows differ, and for sizes always where there is one collective; else in the title.
    named, sized = len(collectives) > 1, len(collectives) == 1 or len(sizes) > 1
    what = "collectives" if named else "".join(collectives)
    at = "" if sized else f" of {''.join(map(format_size, sizes))}"
    table = _table(f"{what}{at}, {outcome.layout.describe()}")
    if named:
        table.add_column("collective", no_wrap=True)
    if sized:
        table.add_column("size", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("ms", "p10-p90", "ratio", "sent/host", "CPU s/GB", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for (collective, nbytes), cell in outcome.cells.items():
        names = [collective] * named + [format_size(nbytes)] * sized
        for index, figures in enumerate(cell):
            table.add_row(
                *(names if index == 0 else [""] * len(names)),
                figures.label,
                _ms(figures.median_s),
                f"{_ms(figures.p10_s)}-{_ms(figures.p90_s)}",
                "" if index == 0 else _ratio_text(ratio(cell[0], figures)),
                format_size(max(figures.sent_per_op)) if outcome.layout.peers > 1 else "-",
                "-" if figures.cpu_s_per_gb is None else f"{figures.cpu_s_per_gb:.2f}",
                "-" if figures.memory_bytes is None else format_size(figures.memory_bytes),
                end_section=index == len(cell) - 1,
            )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _ratio_text(value: float) -> Text:
    return Text(f"{value:.2f}", style="green" if value >= 1 else "red")


def micro_table(figures: dict[str, float]) -> Table:
    """Hashing and folding alone."""
    table = _table("one thread, by MiB")
    table.add_column("what")
    table.add_column("GB/s of input", justify="right")
    for name, rate in figures.items():
        table.add_row(name, f"{rate:.2f}")
    return table


def show(console: Console, outcomes: list[Outcome], micro: dict[str, float], elapsed_s: float) -> None:
    """Print everything."""
    parts: list[Any] = [layout_table(outcome) for outcome in outcomes]
    if micro:
        parts.append(micro_table(micro))
    idle = max((outcome.peer_idle_bytes for outcome in outcomes), default=0)
    notes = (
        [*NOTES, f"a peer's private memory before any tensor: {format_size(idle)}"] if idle else list(NOTES)
    )
    parts += [Text(note, style="dim") for note in (*notes, f"took {elapsed_s:.0f} s")]
    console.print(Group(*parts))


def as_json(spec: Spec, outcomes: list[Outcome], micro: dict[str, float], elapsed_s: float) -> dict[str, Any]:
    """Everything as plain values: seconds, bytes, GB/s."""
    return {
        "frogzmq": __version__,
        "python": platform.python_version(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "kernel": platform.release()},
        "backends": list(spec.backends),
        "elapsed_s": elapsed_s,
        "micro_gb_per_s": micro,
        "layouts": [
            {
                "ranks": outcome.layout.ranks,
                "peers": outcome.layout.peers,
                "peer_idle_bytes": outcome.peer_idle_bytes,
                "cells": [
                    {
                        "collective": collective,
                        "nbytes": nbytes,
                        "ratio": ratio(cell[0], cell[-1]),
                        "figures": [asdict(figures) for figures in cell],
                    }
                    for (collective, nbytes), cell in outcome.cells.items()
                ],
            }
            for outcome in outcomes
        ],
    }
