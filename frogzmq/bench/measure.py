"""How samples become figures. No I/O.

A *cell* is one collective in one layout (ranks, peers) at one size. In a cell the backends take turns in
*blocks* of iterations, so that drift of a shared machine hits all of them alike. One iteration's time is
that of the slowest rank; a cell's figure is the median over all iterations of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Block:
    """One backend's turn at one size. Times are CLOCK_MONOTONIC seconds."""

    label: str
    nbytes: int
    began: float
    ended: float
    iterations: list[float]
    """Seconds of the slowest rank, iteration by iteration."""
    cpu_s: float
    """CPU seconds of all ranks, and of the peers where the backend has some."""
    sent: list[int]
    """Bytes that each machine sent to others."""
    collective: str = "all_reduce"

    @property
    def ops(self) -> int:
        """Operations in it: one more than is timed, which starts all ranks together."""
        return len(self.iterations) + 1


@dataclass(frozen=True)
class Figures:
    """One backend in one cell."""

    label: str
    nbytes: int
    count: int
    """Iterations measured."""
    median_s: float
    p10_s: float
    p90_s: float
    cpu_s_per_op: float
    """CPU seconds of ranks and peers together for one op."""
    cpu_s_per_gb: float | None
    """The same per 1e9 bytes of tensor; None under 64 KiB, where it says nothing."""
    sent_per_op: list[float]
    """Bytes that each machine sends to others for one op."""
    memory_bytes: int | None
    """Peak beyond the ranks' tensors: private memory of ranks and peers, and the arena; None: not sampled."""
    collective: str = "all_reduce"


@dataclass(frozen=True)
class Sample:
    """Memory at one moment (CLOCK_MONOTONIC seconds), in bytes."""

    when: float
    ranks: int
    peers: int
    arena: int


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks; ``share`` in 0..1; ``ValueError`` when there are none."""
    if not values:
        raise ValueError("no samples")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per iteration the time of the slowest rank; every rank must have measured the same iterations."""
    if len({len(times) for times in per_rank}) != 1:
        raise ValueError(f"ranks measured different numbers of iterations: {[len(t) for t in per_rank]}")
    return [max(times) for times in zip(*per_rank, strict=True)]


def join_ranks(rows: Sequence[dict[str, Any]], hosts: int) -> Block:
    """One block out of what every rank said about it."""
    same = {(row["label"], row["collective"], row["nbytes"]) for row in rows}
    if len(same) != 1:
        raise ValueError(f"ranks measured different things in one block: {sorted(same)}")
    sent = [0] * hosts
    for row in rows:
        sent[row["host"]] += row["sent"]
    label, collective, nbytes = same.pop()
    return Block(
        label=label,
        nbytes=nbytes,
        began=min(row["began"] for row in rows),
        ended=max(row["ended"] for row in rows),
        iterations=slowest([row["iterations"] for row in rows]),
        cpu_s=sum(row["cpu_s"] for row in rows),
        sent=sent,
        collective=collective,
    )


def peak_memory(
    blocks: Iterable[Block], samples: Iterable[Sample], tensors: int, own_peers: bool
) -> int | None:
    """Largest memory beyond ``tensors`` bytes of the ranks sampled during the blocks.

    ``own_peers``: the backend has peers and an arena, which then count. Samples are differences to a time
    before any tensor was made.
    """
    spans = [(block.began, block.ended) for block in blocks]
    sizes = [
        sample.ranks - tensors + (sample.peers + sample.arena if own_peers else 0)
        for sample in samples
        if any(began <= sample.when <= ended for began, ended in spans)
    ]
    return max(0, *sizes) if sizes else None


def select(blocks: Iterable[Block], label: str, collective: str, nbytes: int) -> list[Block]:
    """One backend's blocks in a cell."""
    wanted = (label, collective, nbytes)
    return [block for block in blocks if (block.label, block.collective, block.nbytes) == wanted]


def summarise(
    label: str,
    nbytes: int,
    blocks: Sequence[Block],
    memory: int | None = None,
    collective: str = "all_reduce",
) -> Figures:
    """One backend's figures from its blocks in a cell; ``ValueError`` when there are none."""
    mine = select(blocks, label, collective, nbytes)
    times = [seconds for block in mine for seconds in block.iterations]
    if not times:
        raise ValueError(f"no iterations of {collective} by {label} at {nbytes} bytes")
    ops = sum(block.ops for block in mine)
    cpu = sum(block.cpu_s for block in mine) / ops
    sent = [sum(column) / ops for column in zip(*(block.sent for block in mine), strict=True)]
    return Figures(
        label=label,
        nbytes=nbytes,
        count=len(times),
        median_s=percentile(times, 0.5),
        p10_s=percentile(times, 0.1),
        p90_s=percentile(times, 0.9),
        cpu_s_per_op=cpu,
        cpu_s_per_gb=cpu / nbytes * 1e9 if nbytes >= 64 << 10 else None,
        sent_per_op=sent,
        memory_bytes=memory,
        collective=collective,
    )


def ratio(base: Figures, other: Figures) -> float:
    """How many times faster ``other`` is than ``base``."""
    return base.median_s / other.median_s
