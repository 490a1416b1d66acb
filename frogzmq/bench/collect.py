"""Runs one layout's ranks and gathers what they print, with memory sampled beside."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frogzmq.bench import probes
from frogzmq.bench.launch import Ranks, python
from frogzmq.bench.measure import Block, Figures, Sample, join_ranks, peak_memory, select, summarise
from frogzmq.bench.spec import MARK, Layout, Spec, labels_of, tensor_bytes

Progress = Callable[[str, int, float, int], None]
"""Called with the collective, the size, the share of its time that has passed, and the turns taken."""

SAMPLE_S = 0.05
"""Between two looks at memory."""


@dataclass
class Outcome:
    """What one layout gave."""

    layout: Layout
    cells: dict[tuple[str, int], list[Figures]] = field(default_factory=dict)
    """Collective and size in bytes -> figures of every contender, in the order given."""
    blocks: list[Block] = field(default_factory=list)
    peer_idle_bytes: int = 0
    """Private memory of a peer before any tensor, the largest of the peers."""


class Collector:
    """Takes the ranks' lines (from threads) and samples memory (from the waiting thread)."""

    def __init__(self, layout: Layout, on_progress: Progress | None = None) -> None:
        self.layout = layout
        self.rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.ready: dict[int, dict[str, Any]] = {}
        self.samples: list[Sample] = []
        self.base: Sample | None = None
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def line(self, rank: int, line: str) -> None:
        """A rank printed a line; those without the mark are its own affair."""
        if not line.startswith(MARK):
            return
        try:
            told = json.loads(line[len(MARK) :])
        except ValueError:
            return
        kind = told.pop("kind", "")
        with self._lock:
            if kind == "block":
                self.rows[rank].append(told)
            elif kind == "ready":
                self.ready[rank] = told
        if kind == "progress" and self._on_progress is not None:
            self._on_progress(told["collective"], told["nbytes"], told["share"], told["turns"])

    def sample(self) -> None:
        """Look at the memory of all processes; the first look after all are ready is the base."""
        with self._lock:
            if len(self.ready) < self.layout.ranks:
                return
            told = list(self.ready.values())
        when = time.monotonic()
        ranks = sum(probes.private_bytes(row["pid"]) for row in told)
        peers = sum(probes.private_bytes(row["peer"]) for row in told if row["peer"])
        arena = sum(probes.allocated_bytes(probes.arena_files(row["arena"])) for row in told)
        if self.base is None:
            self.base = Sample(when, ranks, peers, 0)
        self.samples.append(Sample(when, ranks - self.base.ranks, peers - self.base.peers, arena))

    def blocks(self) -> list[Block]:
        """Everything measured so far, rank by rank put together."""
        with self._lock:
            columns = [self.rows[rank] for rank in range(self.layout.ranks)]
        return [join_ranks(rows, self.layout.peers) for rows in zip(*columns, strict=True)]


def run_layout(
    layout: Layout,
    spec: Spec,
    deadline_s: float,
    on_progress: Progress | None = None,
) -> Outcome:
    """Measure one layout. ``RankFailed`` where a rank fails or the deadline passes; leaves nothing behind."""
    collector = Collector(layout, on_progress)
    command = [python(), "-m", "frogzmq.bench.worker", spec.to_text()]
    with Ranks(layout, command, on_line=collector.line) as ranks:
        ranks.wait(deadline_s, poll=collector.sample, every_s=SAMPLE_S)
    outcome = Outcome(layout, blocks=collector.blocks())
    if collector.base is not None and collector.base.peers:
        outcome.peer_idle_bytes = collector.base.peers // layout.peers
    for cell in spec.cells():
        outcome.cells[cell] = [
            _figures(label, cell, outcome.blocks, collector.samples, layout, name == "frogzmq")
            for label, name in zip(labels_of(spec.backends), spec.backends, strict=True)
        ]
    return outcome


def _figures(
    label: str,
    cell: tuple[str, int],
    blocks: list[Block],
    samples: list[Sample],
    layout: Layout,
    own_peers: bool,
) -> Figures:
    collective, nbytes = cell
    mine = select(blocks, label, collective, nbytes)
    memory = peak_memory(mine, samples, tensor_bytes(collective, nbytes, layout.ranks), own_peers)
    return summarise(label, nbytes, mine, memory, collective)
