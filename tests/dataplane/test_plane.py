"""Aliasing, bounds, early and wrong chunks, and closing while a fold runs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from frogzmq.dataplane import opbuffers
from frogzmq.dataplane.plane import DataPlane
from frogzmq.descriptor import Descriptor
from frogzmq.errors import StoreFull, WireError
from frogzmq.plan.plan import Plan, make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.store.arena import Arena
from frogzmq.types import Digest, GroupId, Mode, OpKind, Order, PeerId, ReduceOp, Role
from frogzmq.wire.messages import ChunkHeader

GID = GroupId(b"g" * 16)
OTHER = GroupId(b"h" * 16)
MIB = 1 << 20


@pytest.fixture
def arena(tmp_path: Path):
    made = Arena(tmp_path / "shm", max_bytes=16 * MIB, fallback=tmp_path / "disk", warn=print)
    yield made
    made.close()


def plan_for(
    places: str, kind: OpKind, numel: int = MIB // 4, root: int = -1, mode: Mode = Mode.FAITHFUL
) -> Plan:
    reduce = ReduceOp.SUM if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE) else ReduceOp.NONE
    hosts = make_hosts(dict(enumerate(map(PeerId, places))))
    descriptor = Descriptor(kind, reduce, "float32", (numel,), root)
    return make_plan(descriptor, hosts, mode, Order.MACHINE, chunk_bytes=MIB // 4, small_bytes=0)


def contribute(arena: Arena, plane: DataPlane, seq: int, rank: int, value: float) -> tuple[int, int]:
    extent = arena.lease(f"rank{rank}", MIB)
    region = arena.view(extent.seg, extent.off, MIB)
    region.view(np.float32)[:] = value
    plane.put_input(GID, seq, rank, region)
    return extent.seg, extent.off


def test_on_one_machine_a_reduction_needs_no_room_of_its_own(arena: Arena) -> None:
    plane, plan = DataPlane(arena), plan_for("aaaa", OpKind.ALL_REDUCE)
    where = {rank: contribute(arena, plane, 1, rank, rank + 1.0) for rank in (2, 0, 3, 1)}
    plane.open(GID, 1, plan, 0)
    assert arena.usage()["leased_bytes"] == 4 * MIB
    for piece in range(plan.pieces):
        assert plane.fold(GID, 1, piece, False) is None
    result = plane.result(GID, 1, 1)
    assert (result.seg, result.off) == where[0]
    assert (arena.view(result.seg, result.off, MIB).view(np.float32) == 10.0).all()
    assert plane.close(GID, 1) == [2, 0, 3, 1]


def test_on_the_root_machine_a_broadcast_is_not_copied(arena: Arena) -> None:
    for places in ("aaa", "aab"):
        plane, plan = DataPlane(arena), plan_for(places, OpKind.BROADCAST, root=1)
        plane.open(GID, 1, plan, plan.root_host)
        where = contribute(arena, plane, 1, 1, 7.0)
        before = arena.usage()["leased_bytes"]
        for piece in range(plan.pieces):
            plane.fold(GID, 1, piece, False)
        result = plane.result(GID, 1, 0)
        assert (result.seg, result.off) == where
        assert arena.usage()["leased_bytes"] == before
        assert plane.close(GID, 1) == [1]
        assert arena.reclaim("rank1") == MIB


def test_a_part_of_several_ranks_is_folded_in_place_and_counts_when_made(arena: Arena) -> None:
    plane, plan = DataPlane(arena), plan_for("aab", OpKind.ALL_REDUCE)
    plane.open(GID, 1, plan, 0)
    contribute(arena, plane, 1, 1, 2.0)
    seg, off = contribute(arena, plane, 1, 0, 1.0)
    assert not plane.has(GID, 1, Role.PART, 0, 1)
    assert plane.make_part(GID, 1, 0, 1, True) is not None
    assert [plane.has(GID, 1, Role.PART, 0, span) for span in range(4)] == [False, True, False, False]
    header = ChunkHeader(GID, 1, Role.PART, 0, 1, MIB // 4, Digest(b""), b"", 0)
    payload = plane.payload(header)
    assert arena.locate(payload) == (seg, off + MIB // 4)
    assert (payload.view(np.float32) == 3.0).all()
    assert (arena.view(seg, off, MIB // 4).view(np.float32) == 1.0).all(), "other spans are untouched"
    with pytest.raises(LookupError, match="op 1 has no PART 0, 2"):
        plane.payload(header._replace(index=2))
    with pytest.raises(LookupError):
        plane.payload(header._replace(seq=9))
    plane.close(GID, 1)


def test_chunks_that_the_plan_does_not_have_are_refused(arena: Arena) -> None:
    plane, plan = DataPlane(arena), plan_for("ab", OpKind.ALL_REDUCE)
    plane.open(GID, 1, plan, 0)
    good = bytes(MIB // 4)
    for role, part, index, data in (
        (Role.PART, 1, 4, good), (Role.PART, 2, 0, good), (Role.PART, 1, -1, good),
        (Role.PART, 1, 0, good[1:]), (Role.PART, 1, 0, b""), (Role.RESULT, 0, 4, good),
        (Role.RESULT, 0, 0, good + b"x"),
    ):  # fmt: skip
        with pytest.raises(WireError, match="float32"):
            plane.put_chunk(GID, 1, role, part, index, data)
    assert plane.usage()["heap_bytes"] == 0
    plane.put_chunk(GID, 1, Role.PART, 0, 0, good)  # our own part, sent by somebody else
    assert not plane.has(GID, 1, Role.PART, 0, 0)
    plane.close(GID, 1)


def test_chunks_before_the_op_are_bounded_and_placed_when_it_opens(arena: Arena) -> None:
    plane, plan = DataPlane(arena, early_bytes=MIB // 2), plan_for("ab", OpKind.ALL_REDUCE)
    chunk = bytes(MIB // 4)
    assert plane.put_chunk(GID, 1, Role.PART, 1, 0, chunk)
    assert plane.put_chunk(GID, 1, Role.PART, 1, 1, chunk[:5])  # wrong, as will turn out
    assert not plane.put_chunk(GID, 2, Role.PART, 1, 0, chunk)
    assert plane.put_chunk(GID, 1, Role.PART, 1, 0, chunk), "a duplicate costs nothing"
    assert plane.usage()["early_bytes"] == MIB // 4 + 5
    assert plane.usage()["ops"] == 1
    plane.open(GID, 1, plan, 0)
    assert plane.usage()["early_bytes"] == 0
    assert plane.has(GID, 1, Role.PART, 1, 0)
    assert not plane.has(GID, 1, Role.PART, 1, 1)
    plane.put_input(GID, 1, 0, bytes(MIB))
    with pytest.raises(LookupError, match="part 1, span 1 is not here"):
        plane.fold(GID, 1, 1, False)
    plane.close(GID, 1)
    assert arena.usage()["leased_bytes"] == 0


def test_ops_that_need_more_than_there_is_are_refused_and_cost_nothing(arena: Arena) -> None:
    plan = plan_for("abc", OpKind.ALL_REDUCE)
    plane = DataPlane(arena, max_bytes=3 * MIB)
    plane.open(GID, 1, plan, 0)
    with pytest.raises(StoreFull, match=rf"{2 * MIB} of {3 * MIB}"):
        plane.open(GID, 2, plan, 0)
    assert plane.close(GID, 2) == []
    plane.close(GID, 1)
    plane.open(GID, 2, plan, 0)
    plane.close(GID, 2)
    large = plan_for("ab", OpKind.ALL_REDUCE, numel=5 * MIB)
    plane = DataPlane(arena)
    with pytest.raises(StoreFull, match="no room for a tensor"):
        plane.open(GID, 3, large, 0)
    plane.close(GID, 3)
    assert arena.usage()["leased_bytes"] == 0
    assert plane.usage()["reserved_bytes"] == 0


def test_a_group_is_closed_whole_and_others_stay(arena: Arena) -> None:
    plane, plan = DataPlane(arena), plan_for("aa", OpKind.ALL_REDUCE)
    for seq in (1, 2):
        contribute(arena, plane, seq, 1, 1.0)
        plane.open(GID, seq, plan, 0)
    plane.put_input(OTHER, 1, 0, bytes(4))
    assert plane.close_group(GID) == {1: [1], 2: [1]}
    assert plane.usage()["ops"] == 1
    assert plane.fold(GID, 1, 0, True) is None
    assert plane.make_part(GID, 1, 0, 0, True) is None
    assert plane.close(GID, 1) == []


def test_close_waits_for_a_fold_that_runs(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the bytes would be leased again while a thread still writes to them."""
    plane, plan = DataPlane(arena), plan_for("ab", OpKind.ALL_REDUCE)
    plane.open(GID, 1, plan, 0)
    contribute(arena, plane, 1, 0, 1.0)
    plane.put_chunk(GID, 1, Role.PART, 1, 0, bytes(MIB // 4))
    started, proceed, events = threading.Event(), threading.Event(), []
    real = opbuffers.fold_into

    def slow(*args: object) -> None:
        started.set()
        assert proceed.wait(30)
        real(*args)  # type: ignore[arg-type]
        events.append("folded")

    monkeypatch.setattr(opbuffers, "fold_into", slow)
    folder = threading.Thread(target=plane.fold, args=(GID, 1, 0, False))
    folder.start()
    assert started.wait(30)

    def close() -> None:
        plane.close(GID, 1)
        events.append("closed")

    closer = threading.Thread(target=close)
    closer.start()
    closer.join(0.1)
    assert events == []
    proceed.set()
    for thread in (folder, closer):
        thread.join(30)
        assert not thread.is_alive()
    assert events == ["folded", "closed"]
    assert arena.usage()["owners"] == {"rank0": MIB}
