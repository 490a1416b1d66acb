"""What any fabric must do, run on the simulated and on the ZeroMQ one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.fabrics import Fabric, SimFabric, ZmqFabric
from support.fleet import Fleet, PeerProcess
from support.reference import reference, results

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch, RankLost
from frogzmq.plan.plan import make_hosts
from frogzmq.types import Mode, OpKind, Order, PeerId, ReduceOp

Make = Callable[[list[int], Mode, Order], Fabric]
PLACEMENTS = [[0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 0, 2]]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PeerProcess]]:
    """Three real peers, for as many jobs one after another as there are tests."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        started = [fleet.start(ready=False) for _ in range(3)]
        yield [peer.wait_ready() for peer in started]


@pytest.fixture(params=["sim", "zmq"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Fabric] = []

    def build(placement: list[int], mode: Mode = Mode.AUTO, order: Order = Order.MACHINE) -> Fabric:
        fabric: Fabric
        if request.param == "sim":
            fabric = SimFabric(placement, mode, order)
        else:
            fabric = ZmqFabric(placement, mode, order, request.getfixturevalue("machines"))
        made.append(fabric)
        return fabric

    yield build
    for fabric in made:
        fabric.close()


def values(rank: int, count: int) -> np.ndarray:
    """Numbers whose sum depends on the order of addition, all different."""
    rng = np.random.default_rng(1000 + rank)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)


def all_reduce(count: int, op: ReduceOp = ReduceOp.SUM) -> Descriptor:
    return Descriptor(OpKind.ALL_REDUCE, op, "float32", (count,))


def expected(descriptor: Descriptor, data: list[bytes], placement: list[int], order: Order) -> bytes:
    hosts = make_hosts({rank: PeerId(f"{host:016x}") for rank, host in enumerate(placement)})
    return bytes(reference(descriptor, data, [host.ranks for host in hosts], order))


@pytest.mark.parametrize("mode", [Mode.FAITHFUL, Mode.SHARD])
@pytest.mark.parametrize("order", [Order.MACHINE, Order.RANK])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_all_reduce_has_the_reference_bits(
    make: Make, placement: list[int], mode: Mode, order: Order
) -> None:
    fabric = make(placement, mode, order)
    for count in (0, 1, 1000, 700_001):
        data = [values(rank, count).tobytes() for rank in range(len(placement))]
        want = expected(all_reduce(count), data, placement, order)
        got = fabric.run([(all_reduce(count), mine) for mine in data])
        assert got == [want] * len(placement), f"count {count}"


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_kind_gives_every_rank_what_it_is_due(make: Make, placement: list[int]) -> None:
    fabric = make(placement, Mode.AUTO, Order.MACHINE)
    world = len(placement)
    for count in (3, 300_000):
        data = [values(rank, count).tobytes() for rank in range(world)]
        gather = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "float32", (count,))
        assert fabric.run([(gather, mine) for mine in data]) == [b"".join(data)] * world
        for root in range(world):
            cast = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "float32", (count,), root)
            got = fabric.run([(cast, mine) for mine in data])
            assert got == [None if rank == root else data[root] for rank in range(world)]
            reduce = Descriptor(OpKind.REDUCE, ReduceOp.MAX, "float32", (count,), root)
            want = expected(reduce, data, placement, Order.MACHINE)
            got = fabric.run([(reduce, mine) for mine in data])
            assert got == [want if rank == root else None for rank in range(world)]
        barrier = Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,))
        assert fabric.run([(barrier, b"")] * world) == [None] * world


def uneven(kind: OpKind, world: int, count: int, root: int) -> Descriptor:
    """A call with blocks of 0, 1, 2 ... times ``count`` elements."""
    blocks = world * world if kind == OpKind.ALL_TO_ALL else world
    splits = tuple(count * (n * 7 % 4) for n in range(blocks))
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    return Descriptor(kind, reduce, "float32", (sum(splits),), root, splits)


@pytest.mark.parametrize("mode", [Mode.FAITHFUL, Mode.SHARD])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_rank_is_dealt_its_own(make: Make, placement: list[int], mode: Mode) -> None:
    fabric = make(placement, mode, Order.MACHINE)
    world, root = len(placement), len(placement) - 1
    hosts = make_hosts({rank: PeerId(f"{host:016x}") for rank, host in enumerate(placement)})
    none = ReduceOp.NONE
    for count in (0, 3, 150_000):
        for call in (
            Descriptor(OpKind.GATHER, none, "float32", (count,), root),
            Descriptor(OpKind.SCATTER, none, "float32", (count,), root),
            Descriptor(OpKind.REDUCE_SCATTER, ReduceOp.SUM, "float32", (count * world,)),
            Descriptor(OpKind.ALL_TO_ALL, none, "float32", (count * world,)),
            uneven(OpKind.GATHER, world, count, root),
            uneven(OpKind.ALL_GATHER, world, count, -1),
            uneven(OpKind.REDUCE_SCATTER, world, count, -1),
            uneven(OpKind.ALL_TO_ALL, world, count, -1),
        ):
            data = [values(rank, call.gives(rank, world) // 4).tobytes() for rank in range(world)]
            want = results(call, data, [host.ranks for host in hosts])
            assert fabric.run([(call, mine) for mine in data]) == want, call.describe()


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 1], [0, 1, 2]], ids=str)
def test_shapes_that_differ_fail_on_every_rank_and_name_both(make: Make, placement: list[int]) -> None:
    fabric = make(placement, Mode.AUTO, Order.MACHINE)
    calls = [(all_reduce(100 + 100 * (rank == 1)), bytes(400 + 400 * (rank == 1))) for rank in range(3)]
    for error in fabric.run(calls):
        assert isinstance(error, Mismatch)
        assert "rank 1 called all_reduce(SUM) of float32[200]" in str(error)
        assert "float32[100]" in str(error)


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 1], [0, 1, 2]], ids=str)
def test_a_rank_that_fails_is_named_with_its_reason(make: Make, placement: list[int]) -> None:
    fabric = make(placement, Mode.AUTO, Order.MACHINE)
    first = [(all_reduce(4), values(rank, 4).tobytes()) for rank in range(3)]
    assert not any(isinstance(result, Exception) for result in fabric.run(first))
    fabric.leave(2, "ValueError: boom")
    for error in fabric.run([first[0], first[1], None])[:2]:
        assert isinstance(error, RankLost)
        assert "rank 2" in str(error)
        assert "ValueError: boom" in str(error)


def test_a_rank_that_dies_is_named(make: Make) -> None:
    fabric = make([0, 1, 1], Mode.AUTO, Order.MACHINE)
    fabric.die(1)
    errors = fabric.run([(all_reduce(4), bytes(16)), None, (all_reduce(4), bytes(16))])
    assert all(isinstance(errors[rank], RankLost) and "rank 1" in str(errors[rank]) for rank in (0, 2))
