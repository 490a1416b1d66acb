"""Drawing plans, and carrying one out on paper: no machines, no messages, only who holds what."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from frogzmq.descriptor import ROOTED, SPLIT, Descriptor
from frogzmq.dtypes import dtype_of
from frogzmq.plan.plan import FOLDING, Plan, make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.types import Mode, OpKind, Order, PeerId, ReduceOp

Fold = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""``fold(inputs, divide_by)``: one level of folding."""


@st.composite
def descriptors(draw: st.DrawFn, kind: OpKind, size: int, dtype: str = "float32") -> Descriptor:
    """Any call of ``kind`` in a group of ``size`` ranks, even or uneven."""
    root = draw(st.integers(0, size - 1)) if kind in ROOTED else -1
    average = [ReduceOp.AVG] if dtype_of(dtype).kind in ("float", "half") else []
    reduce = draw(st.sampled_from([ReduceOp.SUM, *average])) if kind in FOLDING else ReduceOp.NONE
    most = 3000 if size <= 8 else 20
    if kind in SPLIT and draw(st.booleans()):
        count = size * size if kind == OpKind.ALL_TO_ALL else size
        sizes = st.just(0) | st.integers(0, max(1, most // size))
        if count <= 64:
            splits = tuple(draw(st.lists(sizes, min_size=count, max_size=count)))
        else:
            rng, top = random.Random(draw(st.integers(0, 1 << 30))), draw(st.integers(1, 8))
            splits = tuple(max(0, rng.randint(-top, top)) for _ in range(count))
        return Descriptor(kind, reduce, dtype, (sum(splits),), root, splits)
    numel = 0 if kind == OpKind.BARRIER else draw(st.integers(0, 40) | st.integers(0, most))
    if kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
        numel = numel // size * size
    return Descriptor(kind, reduce, dtype, (numel,), root)


@st.composite
def plans(
    draw: st.DrawFn, kinds: Sequence[OpKind] = tuple(OpKind), dtypes: Sequence[str] = ("float32",)
) -> Plan:
    """Any plan of up to eight ranks on up to five machines, or up to 64 of few bytes."""
    size = draw(st.integers(1, 8) | st.sampled_from([15, 33, 64]))
    places = {rank: PeerId(f"{draw(st.integers(0, 4)):016x}") for rank in range(size)}
    hosts = make_hosts(places)
    kind = draw(st.sampled_from(list(kinds)))
    dtype = draw(st.sampled_from(list(dtypes)))
    shares = draw(
        st.none() | st.lists(st.just(0.0) | st.floats(0, 9), min_size=len(hosts), max_size=len(hosts))
    )
    return make_plan(
        draw(descriptors(kind, size, dtype)),
        hosts,
        draw(st.sampled_from(Mode)),
        draw(st.sampled_from([Order.MACHINE, Order.RANK])),
        chunk_bytes=draw(st.integers(1, 200) | st.integers(1, 5000)),
        small_bytes=draw(st.sampled_from([0, 1000])),
        shares=shares,
    )


class Paper:
    """The bytes that each machine of a plan holds, and how many it sent and received."""

    def __init__(self, plan: Plan, inputs: Sequence[np.ndarray], fold: Fold) -> None:
        self.plan, self.fold = plan, fold
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self._parts: dict[tuple[int, int, int], np.ndarray] = {}
        self._results: dict[tuple[int, int], np.ndarray] = {}
        self._give_parts(inputs)
        self._fold_pieces()

    def result(self, rank: int) -> bytes:
        """What the rank reads; KeyError where a piece of it never reached its machine."""
        plan, interval = self.plan, self.plan.interval(rank)
        host = next(i for i, host in enumerate(plan.hosts) if rank in host.ranks)
        assert interval is not None
        out = np.full(interval.stop - interval.start, 0xA5, np.uint8)
        for piece in range(interval.first, interval.last):
            start, stop = plan.bounds(piece)
            out[start - interval.start : stop - interval.start] = self._results[host, piece]
        return out.tobytes()

    def _move(self, source: int, target: int, data: np.ndarray) -> None:
        self.sent[source] += data.nbytes
        self.received[target] += data.nbytes

    def _give_parts(self, inputs: Sequence[np.ndarray]) -> None:
        for part in self.plan.parts:
            for span in self.plan.cuts[part.index]:
                chunks = [inputs[rank][span.start : span.stop] for rank in part.ranks]
                data = self.fold(chunks, 0)
                self._parts[part.host, part.index, span.index] = data
                for target in self.plan.part_targets(part.index, span.index):
                    self._move(part.host, target, data)
                    self._parts[target, part.index, span.index] = data

    def _fold_pieces(self) -> None:
        plan = self.plan
        divide_by = plan.size if plan.descriptor.reduce == ReduceOp.AVG else 0
        for piece in range(plan.pieces):
            for host in plan.folders(piece):
                sources = [self._parts[host, part, span] for part, span in plan.sources(piece)]
                self._results[host, piece] = self.fold(sources, divide_by)
            for target in plan.receivers(piece):
                data = self._results[plan.sender(piece), piece]
                self._move(plan.sender(piece), target, data)
                self._results[target, piece] = data


def itemsize(plan: Plan) -> int:
    """Bytes in one element."""
    return dtype_of(plan.descriptor.dtype).itemsize
