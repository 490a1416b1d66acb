"""A plan as one machine sees it, worked out once and used by every op with that plan.

A training loop repeats a handful of plans; asking the plan anew for every span of every op would cost more
than the rest of the op's bookkeeping.
"""

from __future__ import annotations

from frogzmq.plan.plan import Part, Plan
from frogzmq.types import OpKind
from frogzmq.wire.limits import INLINE_BYTES

SOLO = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.BARRIER)
"""Kinds in which every rank waits for every other, so that nobody can be handed anything earlier."""


class View:
    """``plan`` from host ``here``. Read-only after construction."""

    __slots__ = (
        "folds", "hands_out", "here", "local", "missing", "nbytes", "part_left", "part_of", "parts_left",
        "pieces_left", "plan", "receives", "solo", "targets", "with_data",
    )  # fmt: skip

    def __init__(self, plan: Plan, here: int) -> None:
        self.plan, self.here = plan, here
        self.nbytes = plan.part_nbytes
        self.local: tuple[Part, ...] = tuple(part for part in plan.parts if part.host == here)
        self.part_of: dict[int, Part] = {rank: part for part in self.local for rank in part.ranks}
        """The local part that a rank contributes to; ranks that give nothing have none."""
        spans, pieces = range(len(plan.spans)), range(plan.pieces)
        self.parts_left = len(plan.spans) * len(self.local)
        self.targets = {p.index: [plan.part_targets(p.index, span) for span in spans] for p in self.local}
        """Part -> for each span, the machines that it is pushed to."""
        self.folds = [here in plan.folders(piece) for piece in pieces]
        receivers = [plan.receivers(piece) for piece in pieces]
        self.receives = [here in each for each in receivers]
        self.hands_out = [
            each if each and plan.sender(piece) == here else () for piece, each in enumerate(receivers)
        ]
        """For each piece, the machines that this one hands it to."""
        self.missing = [len(plan.sources(piece)) if self.folds[piece] else 0 for piece in pieces]
        self.pieces_left = sum(self.folds) + sum(self.receives)
        self.part_left: dict[int, int] = {}
        """Part -> how many of its chunks are due here."""
        for piece in pieces:
            if self.folds[piece]:
                for part, _ in plan.sources(piece):
                    self.part_left[part] = self.part_left.get(part, 0) + 1
        self.with_data = self._ranks_with_data()
        self.solo = (
            len(plan.hosts) == 1 and plan.descriptor.kind in SOLO and plan.result_nbytes <= INLINE_BYTES
        )
        """Whether the op is done in one go once every rank has called it (``FoldSolo``)."""

    def _ranks_with_data(self) -> frozenset[int]:
        descriptor, local = self.plan.descriptor, self.plan.hosts[self.here].ranks
        if descriptor.kind == OpKind.BARRIER:
            return frozenset()
        if descriptor.kind == OpKind.REDUCE:
            return frozenset(rank for rank in local if rank == descriptor.root)
        if descriptor.kind == OpKind.BROADCAST:
            return frozenset(rank for rank in local if rank != descriptor.root)
        return frozenset(local)
