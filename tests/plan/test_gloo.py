"""Order ``gloo`` in the plan: chunks, turns and spans, against a plain model of the ring."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frogzmq.descriptor import Descriptor
from frogzmq.plan.gloo import chunk_nbytes, rings
from frogzmq.plan.plan import make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.types import Mode, OpKind, Order, PeerId, ReduceOp


def test_chunks_as_gloo_cuts_them() -> None:
    # Seen with torch 2.13: two segments a rank at least, a megabyte a segment at most, whole elements.
    assert chunk_nbytes(OpKind.ALL_REDUCE, 4, 4, 2) == 8
    assert chunk_nbytes(OpKind.ALL_REDUCE, 4000, 4, 3) == 2 * 668
    assert chunk_nbytes(OpKind.ALL_REDUCE, 20_000_000, 4, 2) == 10 * 1_000_000
    assert chunk_nbytes(OpKind.REDUCE, 20_000_000, 4, 2) == 10 * (1 << 20)
    assert chunk_nbytes(OpKind.REDUCE, 0, 4, 3) == 0


@st.composite
def plans(draw):
    world = draw(st.integers(1, 6))
    places = {rank: PeerId(f"{draw(st.integers(0, 2)):016x}") for rank in range(world)}
    kind = draw(st.sampled_from([OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER]))
    dtype, itemsize = draw(st.sampled_from([("float32", 4), ("float16", 2), ("float64", 8)]))
    splits: tuple[int, ...] = ()
    count = draw(st.integers(0, 3000))
    if kind == OpKind.REDUCE_SCATTER:
        if draw(st.booleans()):
            splits = tuple(draw(st.lists(st.integers(0, 900), min_size=world, max_size=world)))
            count = sum(splits)
        else:
            count -= count % world
        splits = splits if any(splits) else ()
    root = draw(st.integers(0, world - 1)) if kind == OpKind.REDUCE else -1
    descriptor = Descriptor(kind, ReduceOp.SUM, dtype, (count,), root, splits)
    mode = draw(st.sampled_from([Mode.SHARD, Mode.FAITHFUL, Mode.AUTO]))
    plan = make_plan(descriptor, make_hosts(places), mode, Order.GLOO, chunk_bytes=512, small_bytes=0)
    return plan, itemsize, world


@given(plans())
def test_every_element_is_folded_in_the_order_of_its_ring(made) -> None:
    plan, itemsize, world = made
    descriptor = plan.descriptor
    blocks = [n * itemsize for n in descriptor.splits] or [descriptor.nbytes]
    # What the ring does with the byte at an offset, worked out one by one.
    expected: dict[int, list[int]] = {}
    base = 0
    for nbytes in blocks:
        size = chunk_nbytes(descriptor.kind, nbytes, itemsize, world)
        for offset in range(0, nbytes, itemsize):
            chunk = offset // size
            expected[base + offset] = [(chunk - 1 - step) % world for step in range(world)]
        base += nbytes
    seen: set[int] = set()
    for piece in range(plan.pieces):
        sources = plan.sources(piece)
        span = plan.spans[sources[0][1]]
        assert span.start % itemsize == span.stop % itemsize == 0
        assert span.stop - span.start <= 512
        for offset in range(span.start, span.stop, itemsize):
            assert [plan.parts[part].ranks[0] for part, _ in sources] == expected[offset]
            assert offset not in seen
            seen.add(offset)
    assert len(seen) * itemsize == descriptor.nbytes


def test_integers_need_no_ring() -> None:
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "int64", (1000,))
    assert rings(descriptor, 3) == ()
