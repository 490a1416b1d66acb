"""A plan as one machine sees it, worked out once and used by every op with that plan.

A training loop repeats a handful of plans; asking the plan anew for every span of every op would cost more
than the rest of the op's bookkeeping.
"""

from __future__ import annotations

from typing import NamedTuple

from frogzmq.plan.plan import Interval, Part, Plan, Spans
from frogzmq.types import OpKind
from frogzmq.wire.limits import INLINE_BYTES, POST_ROOM

SOLO = (
    OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.BARRIER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL,
)  # fmt: skip
"""Kinds in which every rank waits for every other, so that nobody can be handed anything earlier."""


class Lane(NamedTuple):
    """Local ``ranks`` that read the same interval: bytes from ``start`` on, pieces ``first:last``."""

    ranks: tuple[int, ...]
    start: int
    first: int
    last: int


class View:
    """``plan`` from host ``here``. Read-only after construction."""

    __slots__ = (
        "alone", "folds", "gives", "hands_out", "here", "lane_of", "lanes", "local", "missing", "part_left",
        "part_of", "parts_left", "pieces_left", "plan", "reads", "receives", "solo", "spans", "targets",
        "unheard",
    )  # fmt: skip

    def __init__(self, plan: Plan, here: int) -> None:
        self.plan, self.here = plan, here
        self.local: tuple[Part, ...] = tuple(part for part in plan.parts if part.host == here)
        self.part_of: dict[int, Part] = {rank: part for part in self.local for rank in part.ranks}
        """The local part that a rank contributes to; ranks that give nothing have none."""
        self.gives = {rank: plan.part_nbytes[part.index] for rank, part in self.part_of.items()}
        """Bytes that each of those ranks gives."""
        self.spans: dict[int, Spans] = {part.index: plan.cuts[part.index] for part in self.local}
        pieces = range(plan.pieces)
        self.parts_left = sum(map(len, self.spans.values()))
        self.targets = {
            part.index: [plan.part_targets(part.index, span) for span in range(len(plan.cuts[part.index]))]
            for part in self.local
        }
        """Part -> for each span, the machines that it is pushed to."""
        self.folds = [here in plan.folders(piece) for piece in pieces]
        receivers = [plan.receivers(piece) for piece in pieces]
        self.receives = [here in each for each in receivers]
        self.hands_out = [
            each if each and plan.sender(piece) == here else () for piece, each in enumerate(receivers)
        ]
        """For each piece, the machines that this one hands it to."""
        self.missing = [plan.fan_in if folds else 0 for folds in self.folds]
        self.pieces_left = sum(self.folds) + sum(self.receives)
        self.part_left: dict[int, int] = {}
        """Part -> how many of its chunks are due here."""
        for piece in pieces:
            if self.folds[piece]:
                for part, _ in plan.sources(piece):
                    self.part_left[part] = self.part_left.get(part, 0) + 1
        self.unheard = 0 if plan.layout is None else len(self.part_left)
        """Parts of which a chunk must have come before a rank may be handed anything.

        A piece folded of all parts shows by itself that all ranks called the same op; one that is gathered or
        dealt out speaks for its own source only.
        """
        ranks = plan.hosts[here].ranks
        self.reads: dict[int, Interval] = {
            rank: interval for rank in ranks if (interval := plan.interval(rank)) is not None
        }
        self.alone = self._ranks_alone()
        """Ranks that need nothing from anybody else: those that only give, and a scatter's root."""
        self.lanes, self.lane_of = self._lanes()
        self.solo = self._solo()
        """Whether the op is done in one go once every rank has called it (``FoldSolo``)."""

    def _ranks_alone(self) -> frozenset[int]:
        descriptor = self.plan.descriptor
        if descriptor.kind == OpKind.BARRIER:
            return frozenset()
        root = descriptor.root if descriptor.kind == OpKind.SCATTER else -1
        return frozenset(rank for rank in self.part_of if rank not in self.reads or rank == root)

    def _lanes(self) -> tuple[tuple[Lane, ...], bytes | list[int]]:
        """Lanes, and the lane of every piece (a piece that nobody here reads: any)."""
        plan = self.plan
        if plan.descriptor.kind == OpKind.BARRIER:
            return (Lane(plan.hosts[self.here].ranks, 0, 0, plan.pieces),), bytes(plan.pieces)
        shared: dict[Interval, list[int]] = {}
        for rank, interval in self.reads.items():
            shared.setdefault(interval, []).append(rank)
        lanes = tuple(Lane(tuple(ranks), at.start, at.first, at.last) for at, ranks in shared.items())
        if len(lanes) <= 1:
            return lanes or (Lane((), 0, 0, plan.pieces),), bytes(plan.pieces)
        lane_of = [0] * plan.pieces
        for index, lane in enumerate(lanes):
            lane_of[lane.first : lane.last] = [index] * (lane.last - lane.first)
        return lanes, lane_of

    def _solo(self) -> bool:
        plan = self.plan
        if len(plan.hosts) > 1 or plan.descriptor.kind not in SOLO:
            return False
        largest = max(*self.gives.values(), *(i.stop - i.start for i in self.reads.values()), 0)
        return largest <= INLINE_BYTES and largest + len(plan.descriptor.encoded) <= POST_ROOM
