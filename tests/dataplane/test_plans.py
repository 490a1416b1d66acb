"""Whole plans carried out in memory: one data plane for each machine, chunks handed over by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support.reference import from_values, reference, results

from frogzmq.content.chunks import digest_chunk
from frogzmq.dataplane.plane import DataPlane
from frogzmq.descriptor import ROOTED, SPLIT, Descriptor
from frogzmq.dtypes import dtype_of
from frogzmq.plan.plan import FOLDING, Plan, make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.store.arena import Arena
from frogzmq.store.map import ArenaMap
from frogzmq.types import Digest, GroupId, Mode, OpKind, Order, PeerId, ReduceOp, Role
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.messages import ChunkHeader

GID = GroupId(b"g" * 16)
CHUNK = 4096
PLACES = {
    "one host": "aaa",
    "one rank": "a",
    "two hosts": "aabb",
    "two hosts, ranks mixed": "abab",
    "three hosts": "abca",
    "three lone ranks": "abc",
}
OPS = [
    (OpKind.ALL_REDUCE, ReduceOp.SUM),
    (OpKind.ALL_REDUCE, ReduceOp.AVG),
    (OpKind.ALL_REDUCE, ReduceOp.MAX),
    (OpKind.REDUCE, ReduceOp.SUM),
    (OpKind.BROADCAST, ReduceOp.NONE),
    (OpKind.ALL_GATHER, ReduceOp.NONE),
    (OpKind.BARRIER, ReduceOp.NONE),
    (OpKind.GATHER, ReduceOp.NONE),
    (OpKind.SCATTER, ReduceOp.NONE),
    (OpKind.REDUCE_SCATTER, ReduceOp.AVG),
    (OpKind.ALL_TO_ALL, ReduceOp.NONE),
]


def make_inputs(descriptor: Descriptor, size: int, seed: int) -> list[np.ndarray]:
    """One uint8 array for each rank, with values that show in which order they were added."""
    rng, dtype = np.random.default_rng(seed), dtype_of(descriptor.dtype)
    counts = [descriptor.gives(rank, size) // dtype.itemsize for rank in range(size)]
    if dtype.kind == "int":
        values = [rng.integers(-(1 << 40), 1 << 40, count) for count in counts]
        return [v.astype(dtype.numpy).view(np.uint8) for v in values]
    values = [rng.normal(0, 1, count) * 10.0 ** rng.integers(-3, 4, count) for count in counts]
    return [from_values(v.astype(np.float32), dtype).copy() for v in values]


class Machines:
    """The machines of one op; stands in for the core, the network and the ranks."""

    def __init__(self, plan: Plan, arenas: list[Arena | None], seq: int = 1, seed: int = 0) -> None:
        self.plan, self.arenas, self.seq = plan, arenas, seq
        self.planes = [DataPlane(arena) for arena in arenas]
        self.random = random.Random(f"order {seed}")
        self.leases: dict[int, object] = {}

    def contribute(self, host: int, rank: int, data: np.ndarray) -> None:
        arena, plane, buf = self.arenas[host], self.planes[host], data.copy()
        if arena is not None and len(data) > INLINE_BYTES:
            extent = arena.lease(f"rank{rank}", len(data))
            self.leases[rank] = extent
            buf = arena.view(extent.seg, extent.off, len(data))
            buf[:] = data
        elif arena is not None:
            buf = data.tobytes()  # type: ignore[assignment]
        plane.put_input(GID, self.seq, rank, buf)

    def header(self, role: Role, part: int, index: int, size: int, digest: Digest) -> ChunkHeader:
        return ChunkHeader(GID, self.seq, role, part, index, size, digest, b"", 0)

    def send(self, here: int, there: int, role: Role, part: int, index: int, digest: Digest) -> None:
        """Hand one chunk over, checking it as the receiver does."""
        assert self.planes[here].has(GID, self.seq, role, part, index)
        payload = self.planes[here].payload(self.header(role, part, index, 0, digest))
        assert digest_chunk(payload) == digest
        received = memoryview(bytes(payload))
        for _ in range(2):  # a duplicate changes nothing
            assert self.planes[there].put_chunk(GID, self.seq, role, part, index, received)
        assert self.planes[there].has(GID, self.seq, role, part, index)

    def run(self, inputs: list[np.ndarray], early: int) -> None:
        """Everything of the op. Machine ``early`` is opened only when the others have sent their parts."""
        plan, hosts = self.plan, range(len(self.plan.hosts))
        late = {early} if len(hosts) > 1 else set()
        for host in hosts:
            self.contribute_all(host, inputs, opens=host not in late)
        parts = [(part, span.index) for part in plan.parts for span in plan.cuts[part.index]]
        self.random.shuffle(parts)
        # Parts of the machine that opens late are made and sent after those of the others have arrived.
        parts.sort(key=lambda item: item[0].host in late)
        for part, span in parts:
            if part.host in late:
                for host in late:
                    self.planes[host].open(GID, self.seq, plan, host)
                late = set()
            self.make_and_send(part.index, span)
        for host in late:
            self.planes[host].open(GID, self.seq, plan, host)
        pieces = [(host, piece) for piece in range(plan.pieces) for host in plan.folders(piece)]
        self.random.shuffle(pieces)
        for host, piece in pieces:
            leaves = bool(plan.receivers(piece)) and plan.sender(piece) == host
            digest = self.planes[host].fold(GID, self.seq, piece, leaves)
            assert (digest is not None) == leaves
            if digest is not None:
                for receiver in plan.receivers(piece):
                    self.send(host, receiver, Role.RESULT, 0, piece, digest)

    def contribute_all(self, host: int, inputs: list[np.ndarray], opens: bool) -> None:
        plan, ranks = self.plan, list(self.plan.hosts[host].ranks)
        self.random.shuffle(ranks)
        for index, rank in enumerate(ranks):
            rooted = plan.descriptor.kind in (OpKind.BROADCAST, OpKind.SCATTER)
            if not rooted or rank == plan.descriptor.root:
                self.contribute(host, rank, inputs[rank])
            if index == 0 and opens:  # opened by the first rank that calls, as the core does
                self.planes[host].open(GID, self.seq, plan, host)

    def make_and_send(self, part: int, span: int) -> None:
        plan = self.plan
        host, targets = plan.parts[part].host, plan.part_targets(part, span)
        if targets or len(plan.parts[part].ranks) > 1:
            digest = self.planes[host].make_part(GID, self.seq, part, span, bool(targets))
            assert (digest is not None) == bool(targets)
            for target in targets:
                assert digest is not None
                self.send(host, target, Role.PART, part, span, digest)

    def check(self, expected: list[bytes | None]) -> None:
        """Every rank's result stands where ``result`` says; a machine that needs none has none."""
        for host, (plane, arena) in enumerate(zip(self.planes, self.arenas, strict=True)):
            for rank in self.plan.hosts[host].ranks:
                if not self.plan.needs(host):
                    with pytest.raises(LookupError):
                        plane.result(GID, self.seq, rank)
                elif self.plan.interval(rank) is not None:
                    self.check_rank(plane, arena, rank, expected[rank])

    def check_rank(self, plane: DataPlane, arena: Arena | None, rank: int, expected: bytes | None) -> None:
        assert expected is not None
        result = plane.result(GID, self.seq, rank)
        assert result.total == len(expected)
        if result.total <= INLINE_BYTES:
            assert result.inline == expected
        elif arena is None:
            assert (result.inline, result.seg) == (None, -1)
            assert bytes(plane.result_bytes(GID, self.seq)[result.off :][: result.total]) == expected
        else:
            assert result.inline is None
            mapped = ArenaMap(arena.paths)
            assert bytes(mapped.view(result.seg, result.off, result.total)) == expected

    def close(self) -> None:
        """Everything is free again, and the ranks whose regions were used are named."""
        for plane, arena, host in zip(self.planes, self.arenas, self.plan.hosts, strict=True):
            freed = plane.close(GID, self.seq)
            assert sorted(freed) == [rank for rank in host.ranks if rank in self.leases]
            for rank in freed:
                assert arena is not None
                arena.release(self.leases[rank])  # type: ignore[arg-type]
            usage = plane.usage()
            assert {k: v for k, v in usage.items() if k != "max_bytes"} == dict.fromkeys(
                ("ops", "heap_bytes", "reserved_bytes", "early_bytes"), 0
            )
            if arena is not None:
                assert arena.usage()["leased_bytes"] == 0


def describe(
    kind: OpKind, reduce: ReduceOp, dtype: str, nbytes: int, root: int, world: int, uneven: bool
) -> Descriptor:
    count = 0 if kind == OpKind.BARRIER else nbytes // dtype_of(dtype).itemsize
    if kind in SPLIT and uneven:
        blocks = world * world if kind == OpKind.ALL_TO_ALL else world
        rng = random.Random(nbytes)
        splits = tuple(rng.choice([0, count // 2, count]) for _ in range(blocks))
        return Descriptor(kind, reduce, dtype, (sum(splits),), root, splits)
    if kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
        count *= world
    return Descriptor(kind, reduce, dtype, (count,), root)


@pytest.mark.parametrize("mode", [Mode.FAITHFUL, Mode.SHARD])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("kind", "reduce"), OPS, ids=lambda value: value.name.lower())
def test_every_kind_matches_the_reference(
    kind: OpKind, reduce: ReduceOp, places: str, mode: Mode, tmp_path: Path
) -> None:
    hosts = make_hosts({rank: PeerId(place) for rank, place in enumerate(places)})
    arenas = [
        Arena(tmp_path / f"shm{i}", max_bytes=64 << 20, fallback=tmp_path / f"disk{i}", warn=print)
        for i in range(len(hosts))
    ]
    for dtype in ("float32", "int64", "bfloat16"):
        if dtype == "int64" and reduce == ReduceOp.AVG:
            continue
        for case, nbytes in enumerate((0, 8, 3 * CHUNK + 1000, INLINE_BYTES + 3 * CHUNK + 200)):
            root = case % len(places) if kind in ROOTED else -1
            order = Order.RANK if case == 2 else Order.MACHINE
            uneven = dtype != "float32"
            descriptor = describe(kind, reduce, dtype, nbytes, root, len(places), uneven)
            plan = make_plan(descriptor, hosts, mode, order, chunk_bytes=CHUNK, small_bytes=0)
            inputs = make_inputs(descriptor, len(places), case)
            expected = results(descriptor, inputs, [host.ranks for host in hosts], order)
            for backing in (arenas, [None] * len(hosts)):
                machines = Machines(plan, list(backing), seed=case)
                machines.run(inputs, early=case % len(hosts))
                machines.check(expected)
                machines.close()
    for arena in arenas:
        arena.close()


def test_folding_leaves_contributions_of_other_machines_untouched_until_close() -> None:
    """A third machine may ask for any part long after it was folded."""
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (3000,))
    hosts = make_hosts(dict(enumerate(map(PeerId, "aabbc"))))
    plan = make_plan(descriptor, hosts, Mode.FAITHFUL, Order.MACHINE, chunk_bytes=CHUNK, small_bytes=0)
    inputs = make_inputs(descriptor, 5, 1)
    machines = Machines(plan, [None] * 3)
    machines.run(inputs, early=1)
    sums = [
        reference(descriptor, [inputs[rank] for rank in host.ranks], [range(len(host.ranks))])
        for host in hosts
    ]
    for plane in machines.planes:
        for part in plan.parts:
            for span in plan.spans:
                header = machines.header(Role.PART, part.index, span.index, 0, Digest(b""))
                assert bytes(plane.payload(header)) == sums[part.index][span.start : span.stop]
    assert machines.planes[2].usage()["heap_bytes"] == 2 * descriptor.nbytes
    machines.close()


@pytest.mark.parametrize("kind", [OpKind.ALL_GATHER, OpKind.BROADCAST])
def test_received_bytes_that_stand_in_the_result_are_not_held_twice(kind: OpKind) -> None:
    assert kind not in FOLDING
    root = 0 if kind == OpKind.BROADCAST else -1
    descriptor = Descriptor(kind, ReduceOp.NONE, "uint8", (5 * CHUNK,), root)
    hosts = make_hosts(dict(enumerate(map(PeerId, "abc"))))
    plan = make_plan(descriptor, hosts, Mode.FAITHFUL, Order.MACHINE, chunk_bytes=CHUNK, small_bytes=0)
    inputs = [np.full(5 * CHUNK, rank, np.uint8) for rank in range(3)]
    machines = Machines(plan, [None] * 3)
    machines.run(inputs, early=2)
    for plane in machines.planes:
        assert plane.usage()["heap_bytes"] == 0
        header = machines.header(Role.PART, 0, 2, 0, Digest(b""))
        assert bytes(plane.payload(header)) == bytes(CHUNK)
    machines.close()
