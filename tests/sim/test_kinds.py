"""Every kind of collective, even and uneven, under the simulator: delays, loss and damage change no byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import descriptors
from support.reference import results

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch, RankLost
from frogzmq.plan.plan import make_hosts
from frogzmq.proto.settings import CoreSettings
from frogzmq.sim.cluster import Cluster
from frogzmq.sim.network import LinkModel
from frogzmq.types import Mode, OpKind, Order, ReduceOp

DEALT_OUT = (OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)
KINDS = (*DEALT_OUT, OpKind.ALL_GATHER, OpKind.REDUCE, OpKind.BROADCAST)


def inputs(descriptor: Descriptor, world: int, seed: int = 0) -> list[bytes]:
    """What each rank gives; sums of these numbers depend on the order of addition."""
    rng = np.random.default_rng(seed)
    counts = [descriptor.gives(rank, world) // 4 for rank in range(world)]
    return [(rng.standard_normal(count) * 1e3).astype(np.float32).tobytes() for count in counts]


def wanted(cluster: Cluster, descriptor: Descriptor, data: list[bytes]) -> list[bytes | None]:
    hosts = make_hosts({rank: peer.id for rank, peer in cluster.host_of.items()})
    return results(descriptor, data, [host.ranks for host in hosts], cluster.options.order)


def grown(descriptor: Descriptor, times: int) -> Descriptor:
    """The same call with blocks ``times`` as long."""
    shape = tuple(n * times for n in descriptor.shape)
    return replace(descriptor, shape=shape, splits=tuple(n * times for n in descriptor.splits))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], list[Descriptor]]:
    """Where each rank lives, and the calls of one job."""
    placement = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    calls = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    times = draw(st.sampled_from([1, 1, 37]))
    return placement, [grown(draw(descriptors(kind, len(placement))), times) for kind in calls]


@settings(max_examples=120, deadline=None)
@given(
    job=jobs(),
    mode=st.sampled_from(Mode),
    order=st.sampled_from([Order.MACHINE, Order.RANK]),
    delays=st.lists(st.floats(0, 0.5), min_size=6, max_size=6),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
    damage=st.sampled_from([0.0, 0.0, 0.02]),
    duplicate=st.sampled_from([0.0, 0.1]),
    chunk=st.sampled_from([256, 4096, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
def test_every_rank_gets_its_bytes_whatever_happens_on_the_way(
    job: tuple[list[int], list[Descriptor]], mode: Mode, order: Order, delays: list[float],
    loss: float, damage: float, duplicate: float, chunk: int, seed: int,
) -> None:  # fmt: skip
    placement, calls = job
    link = LinkModel(delay_s=0.01, jitter_s=0.005, rate=50e6, loss=loss, damage=damage, duplicate=duplicate)
    core = CoreSettings(chunk_bytes=chunk)
    cluster = Cluster([0, 0, 0], seed=str(seed), link=link, settings=core, mode=mode, order=order,
                      placement=placement)  # fmt: skip
    cluster.join()
    assert not cluster.errors
    data = [inputs(call, cluster.size, seed + index) for index, call in enumerate(calls)]
    for call, given_ in zip(calls, data, strict=True):
        cluster.run(cluster.post_all(call, given_, delays))
    assert not cluster.errors
    for seq, (call, given_) in enumerate(zip(calls, data, strict=True), 1):
        got = [cluster.results[rank].get(seq) for rank in range(cluster.size)]
        assert got == wanted(cluster, call, given_), call.describe()
    cluster.idle()
    assert all(peer.plane.usage()["ops"] == 0 for peer in cluster.peers.values())


@pytest.mark.parametrize("kind", DEALT_OUT, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("hosts", [[4], [2, 2], [1, 1, 2]], ids=str)
def test_contributions_may_trickle_in(hosts: list[int], kind: OpKind) -> None:
    """A rank whose own result is complete is not done before all that it gives is here."""
    cluster = Cluster(hosts, settings=CoreSettings(chunk_bytes=4096))
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    call = Descriptor(
        kind, reduce, "float32", (40_000,), 1 if kind in (OpKind.GATHER, OpKind.SCATTER) else -1
    )
    data = inputs(call, 4)
    for rank in range(4):
        cluster.post(rank, call, data[rank], ready=0)
    sizes = [call.gives(rank, 4) for rank in range(4)]
    for share in range(1, 9):
        for rank in range(4):
            if sizes[rank]:
                assert cluster.results[rank] == {}
                cluster.more(rank, 1, sizes[rank] * share // 8)
            cluster.world.advance(0.01)
    cluster.run()
    assert [cluster.results[rank][1] for rank in range(4)] == wanted(cluster, call, data)


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SCATTER], ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("count", [8, 20_000])
def test_ranks_that_need_nobody_run_ahead_by_a_bounded_number_of_ops(
    hosts: list[int], kind: OpKind, count: int
) -> None:
    cluster = Cluster(hosts)
    cluster.join()
    ahead = 0 if kind == OpKind.SCATTER else 1
    call = Descriptor(kind, ReduceOp.NONE, "float32", (count,), 0)
    window = cluster.peers["A"].settings.window
    posted: list[list[bytes]] = []
    while cluster.seq[ahead] - len(cluster.results[ahead]) < window and cluster.seq[ahead] < 1000:
        posted.append(inputs(call, 2, len(posted)))
        cluster.post(ahead, call, posted[-1][ahead])
        cluster.world.advance(0.001)
    assert window < len(cluster.results[ahead]) <= 2 * window
    for given_ in posted:
        cluster.post(1 - ahead, call, given_[1 - ahead])
        cluster.world.advance(0.001)
    cluster.run()
    cluster.idle()
    for seq, given_ in enumerate(posted, 1):
        assert [cluster.results[rank][seq] for rank in (0, 1)] == wanted(cluster, call, given_)
    counters = [peer.core.snapshot(cluster.world.now)["counters"] for peer in cluster.peers.values()]
    assert all(c["drops"] == c["duplicates"] == c["repairs_answered"] == 0 for c in counters)


@pytest.mark.parametrize("kind", DEALT_OUT, ids=lambda kind: kind.name.lower())
def test_a_lost_chunk_of_any_kind_is_asked_for_again(kind: OpKind) -> None:
    cluster = Cluster([2, 2], settings=CoreSettings(chunk_bytes=256))
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    call = Descriptor(kind, reduce, "float32", (400,), 0 if kind in (OpKind.GATHER, OpKind.SCATTER) else -1)
    for path in (("A", "B"), ("B", "A")):
        cluster.network.set(*path, LinkModel(loss=1.0))
    data = inputs(call, 4)
    cluster.post_all(call, data)
    cluster.world.advance(0.2)
    for path in (("A", "B"), ("B", "A")):
        cluster.network.set(*path, LinkModel())
    cluster.run()
    assert [cluster.results[rank][1] for rank in range(4)] == wanted(cluster, call, data)
    assert sum(peer.core.stats.repairs_answered for peer in cluster.peers.values()) >= 1


@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("kind", [OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL], ids=str)
def test_ranks_that_disagree_get_nothing_and_an_error_that_names_both(hosts: list[int], kind: OpKind) -> None:
    """Even where everything that a rank reads has come from ranks that agree with it."""
    cluster = Cluster(hosts, mode=Mode.FAITHFUL)
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    count = 9 if kind == OpKind.ALL_TO_ALL else 3
    # Nobody gives rank 0 anything, or to the others but rank 1: it needs no bytes of those who disagree.
    first = tuple(1 if n == 1 else 0 for n in range(count))
    other = tuple(2 if n == 1 else 0 for n in range(count))
    for rank, splits in enumerate((first, first, other)):
        call = Descriptor(kind, reduce, "float32", (sum(splits),), -1, splits)
        cluster.post(rank, call, bytes(call.gives(rank, 3)))
        cluster.world.advance(0.3)
    cluster.world.run(lambda: len(cluster.errors) == 3, 20)
    for rank in range(3):
        assert cluster.results[rank] == {}
        assert isinstance(cluster.errors[rank], Mismatch)
        assert "splits [0, 1" in str(cluster.errors[rank])
        assert "splits [0, 2" in str(cluster.errors[rank])


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.REDUCE], ids=lambda kind: kind.name.lower())
def test_two_roots_that_wait_for_each_other_hear_that_they_disagree(kind: OpKind) -> None:
    """Neither machine owes the other anything, so no chunk could tell them."""
    cluster = Cluster([2, 2])
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE else ReduceOp.NONE
    for rank in range(4):
        cluster.post(rank, Descriptor(kind, reduce, "float32", (1000,), 2 * (rank // 2)), bytes(4000))
    cluster.world.run(lambda: len(cluster.errors) == 4, 20)
    for error in cluster.errors.values():
        assert isinstance(error, Mismatch)
        assert "root 0" in str(error)
        assert "root 2" in str(error)


@pytest.mark.parametrize("kind", DEALT_OUT, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("mode", Mode)
def test_each_byte_that_another_machine_needs_crosses_once(kind: OpKind, mode: Mode) -> None:
    cluster = Cluster([2, 3, 1], mode=mode)
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    slice_ = 5000 * 4
    per_rank = 1 if kind in (OpKind.GATHER, OpKind.SCATTER) else 6
    call = Descriptor(kind, reduce, "float32", (5000 * per_rank,), 3 if per_rank == 1 else -1)
    cluster.run(cluster.post_all(call, inputs(call, 6)))
    least = {
        OpKind.GATHER: {"A": 0, "B": 3 * slice_, "C": 0},
        OpKind.SCATTER: {"A": 2 * slice_, "B": 0, "C": slice_},
        OpKind.REDUCE_SCATTER: {"A": 2 * 2 * slice_, "B": 2 * 3 * slice_, "C": 2 * slice_},
        OpKind.ALL_TO_ALL: {"A": 4 * 2 * slice_, "B": 3 * 3 * slice_, "C": 5 * slice_},
    }[kind]
    for name, peer in cluster.peers.items():
        assert peer.core.stats.chunk_bytes_received == least[name]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            Descriptor(OpKind.ALL_TO_ALL, ReduceOp.NONE, "float32", (4,)),
            "4 elements cannot be dealt out evenly",
        ),
        (
            Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "float32", (2,), -1, (1, 1)),
            "2 splits in a group of 3",
        ),
        (Descriptor(OpKind.SCATTER, ReduceOp.NONE, "float32", (4,), 5), "no such root rank"),
    ],
)
def test_a_call_that_the_group_cannot_run_fails_on_all_ranks_with_the_reason(
    call: Descriptor, text: str
) -> None:
    cluster = Cluster([1, 2])
    cluster.join()
    for rank in range(3):
        cluster.post(rank, call, b"")
    cluster.world.run(lambda: len(cluster.errors) == 3, 20)
    for error in cluster.errors.values():
        assert isinstance(error, Mismatch)
        assert text in str(error)


@pytest.mark.parametrize("kind", DEALT_OUT, ids=lambda kind: kind.name.lower())
def test_a_rank_that_dies_is_named_and_what_it_gave_is_used(kind: OpKind) -> None:
    cluster = Cluster([2, 1], link=LinkModel(delay_s=0.1))
    cluster.join()
    reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
    call = Descriptor(
        kind, reduce, "float32", (30_000,), 2 if kind in (OpKind.GATHER, OpKind.SCATTER) else -1
    )
    data = inputs(call, 3)
    for rank in range(3):
        cluster.post(rank, call, data[rank])
    cluster.leave(1, clean=False, reason="was killed")
    cluster.world.run(lambda: all(1 in cluster.results[rank] for rank in (0, 2)), 30)
    want = wanted(cluster, call, data)
    assert [cluster.results[rank][1] for rank in (0, 2)] == [want[0], want[2]]
    for rank in (0, 2):
        cluster.post(rank, call, data[rank])
    cluster.world.run(lambda: {0, 2} <= cluster.errors.keys(), 30)
    assert all(isinstance(cluster.errors[rank], RankLost) for rank in (0, 2))
    cluster.idle()
