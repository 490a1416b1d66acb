"""The core under the simulator: faults that real sockets cannot be made to show on demand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import reference

from frogzmq.descriptor import Descriptor
from frogzmq.errors import DeadlineExceeded, IntegrityError, Mismatch, PeerUnreachable, RankLost
from frogzmq.machine import RankJoined
from frogzmq.plan.plan import make_hosts
from frogzmq.sim.cluster import Cluster
from frogzmq.sim.network import LinkModel
from frogzmq.types import ConnId, Mode, OpKind, Order, ReduceOp
from frogzmq.wire.messages import GroupOptions


def sums(count: int) -> Descriptor:
    return Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (count,))


def numbers(ranks: int, count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(count) * 1e3).astype(np.float32).tobytes() for _ in range(ranks)]


def want(cluster: Cluster, descriptor: Descriptor, data: list[bytes]) -> bytes:
    hosts = make_hosts({rank: peer.id for rank, peer in cluster.host_of.items()})
    return bytes(reference(descriptor, data, [host.ranks for host in hosts], cluster.options.order))


@settings(max_examples=40, deadline=None)
@given(
    hosts=st.lists(st.integers(1, 2), min_size=1, max_size=4),
    mode=st.sampled_from([Mode.FAITHFUL, Mode.SHARD, Mode.AUTO]),
    order=st.sampled_from([Order.MACHINE, Order.RANK]),
    counts=st.lists(st.sampled_from([0, 1, 7, 1000, 300_000]), min_size=1, max_size=4),
    delays=st.lists(st.floats(0, 0.5), min_size=8, max_size=8),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
    damage=st.sampled_from([0.0, 0.0, 0.02]),
    duplicate=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1 << 30),
)
def test_any_mode_route_delay_and_fault_gives_the_same_bits(
    hosts: list[int], mode: Mode, order: Order, counts: list[int], delays: list[float],
    loss: float, damage: float, duplicate: float, seed: int,
) -> None:  # fmt: skip
    link = LinkModel(delay_s=0.01, jitter_s=0.005, rate=50e6, loss=loss, damage=damage, duplicate=duplicate)
    cluster = Cluster(hosts, seed=str(seed), link=link, mode=mode, order=order)
    cluster.join()
    assert not cluster.errors
    for count in counts:
        data = numbers(cluster.size, count, seed)
        seq = cluster.post_all(sums(count), data, delays)
        cluster.run(seq)
        expected = want(cluster, sums(count), data)
        assert [cluster.results[rank].get(seq) for rank in range(cluster.size)] == [expected] * cluster.size
    cluster.idle()
    assert all(peer.plane.usage()["ops"] == 0 for peer in cluster.peers.values())


def test_runs_replay_from_their_seed() -> None:
    def run(seed: str) -> str:
        cluster = Cluster([1, 2, 1], seed=seed, link=LinkModel(loss=0.1, jitter_s=0.01))
        cluster.join()
        cluster.run(cluster.post_all(sums(300_000), numbers(4, 300_000)))
        return cluster.world.trace

    assert run("7") == run("7")
    assert run("7") != run("8")


def test_a_far_contribution_may_arrive_before_a_near_one() -> None:
    cluster = Cluster([2, 1], link=LinkModel(delay_s=0.05))
    cluster.join()
    cluster.post_all(sums(4), numbers(3, 4), [0.0, 0.4, 0.0])
    cluster.world.advance(0.3)
    ops = cluster.peers["A"].core.snapshot(cluster.world.now)["groups"][0]["ops"]
    assert [row["ranks"] for row in ops[0]["observed"]] == [[0], [2]]
    assert ops[0]["missing"] == [1]
    cluster.run()


def test_a_lost_chunk_is_asked_for_again() -> None:
    cluster = Cluster([1, 1])
    cluster.join()
    cluster.network.set("B", "A", LinkModel(loss=1.0))
    cluster.post_all(sums(4), numbers(2, 4))
    cluster.world.advance(0.2)
    assert 1 in cluster.results[1]
    assert 1 not in cluster.results[0]
    cluster.network.set("B", "A", LinkModel())
    cluster.run()
    assert cluster.peers["A"].core.snapshot(cluster.world.now)["counters"]["repairs_asked"] >= 1
    assert cluster.peers["B"].core.stats.repairs_answered >= 1


def test_a_broken_path_resumes_with_the_missing_chunks_only() -> None:
    cluster = Cluster([1, 1], link=LinkModel(delay_s=0.02, rate=20e6))
    cluster.join()
    count = 5_000_000
    cluster.post_all(sums(count), numbers(2, count))
    cluster.world.advance(0.4)
    cluster.network.cut("A", "B")
    for peer, other in (("A", "B"), ("B", "A")):
        cluster.peers[peer].lost(f"tcp://{other}:1", "connection reset")
    cluster.world.advance(0.5)
    cluster.network.heal("A", "B")
    cluster.run()
    assert not cluster.errors
    window = cluster.peers["A"].settings.credit_bytes
    for key in (("A", "B"), ("B", "A")):
        assert cluster.network.sent_bytes[key] < count * 4 + window + (2 << 20)


def test_a_damaged_chunk_is_fetched_from_an_honest_holder() -> None:
    cluster = Cluster([1, 1, 1], mode=Mode.FAITHFUL)
    cluster.join()
    cluster.network.set("A", "B", LinkModel(damage=1.0))
    data = numbers(3, 1000)
    cluster.run(cluster.post_all(sums(1000), data))
    assert cluster.results[1][1] == want(cluster, sums(1000), data)
    assert cluster.peers["B"].core.stats.rejected_chunks >= 1


def test_damage_without_an_honest_holder_names_the_machine() -> None:
    cluster = Cluster([1, 1])
    cluster.join()
    cluster.network.set("A", "B", LinkModel(damage=1.0))
    cluster.post_all(sums(1000), numbers(2, 1000))
    cluster.world.run(lambda: 1 in cluster.errors, 30)
    assert isinstance(cluster.errors[1], IntegrityError)
    assert "machine A" in str(cluster.errors[1])


def test_a_lost_last_word_is_asked_for() -> None:
    """The only message with a machine's watermark was damaged: the op must close all the same."""
    link = LinkModel(delay_s=0.01, jitter_s=0.005, rate=50e6, damage=0.02)
    cluster = Cluster([1, 2, 2, 2], seed="2", link=link, mode=Mode.FAITHFUL)
    cluster.join()
    cluster.run(cluster.post_all(sums(1), numbers(7, 1, 2), [0.0] * 6 + [0.5]))
    cluster.idle()
    assert all(peer.plane.usage()["ops"] == 0 for peer in cluster.peers.values())


def test_a_killed_machine_fails_the_others_within_ten_seconds() -> None:
    cluster = Cluster([1, 1, 1])
    cluster.join()
    cluster.run(cluster.post_all(sums(10), numbers(3, 10)))
    cluster.peers["C"].kill()
    started = cluster.world.now
    for rank in (0, 1):
        cluster.post(rank, sums(10), bytes(40))
    cluster.world.run(lambda: {0, 1} <= cluster.errors.keys(), 30)
    assert cluster.world.now - started < 10
    for rank in (0, 1):
        assert isinstance(cluster.errors[rank], RankLost)
        assert "machine C" in str(cluster.errors[rank])


def test_a_silent_machine_is_given_up_and_a_stalled_one_is_not() -> None:
    cluster = Cluster([1, 1])
    cluster.join()
    cluster.network.cut("A", "B")
    cluster.post_all(sums(10), numbers(2, 10))
    cluster.world.advance(8.0)
    cluster.network.heal("A", "B")
    cluster.run()
    assert not cluster.errors
    cluster.network.cut("A", "B")
    cluster.post_all(sums(10), numbers(2, 10))
    cluster.world.run(lambda: len(cluster.errors) == 2, 20)
    assert all(isinstance(error, RankLost) for error in cluster.errors.values())


@pytest.mark.parametrize("hosts", [[2], [1, 1], [1, 1, 1]])
def test_a_source_that_was_told_that_it_is_done_hears_of_a_mismatch(hosts: list[int]) -> None:
    """It handed over what it owed, so its call is over; that the others called something else comes after."""
    cluster = Cluster(hosts)
    cluster.join()
    cast = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "float32", (10,), 0)
    cluster.post(0, cast, bytes(40))
    cluster.world.advance(0.5)
    assert cluster.results[0] == {1: None}
    for rank in range(1, cluster.size):
        cluster.post(rank, sums(10), bytes(40))
    cluster.world.run(lambda: len(cluster.errors) == cluster.size, 5.0)  # no further call is needed
    for error in cluster.errors.values():
        assert isinstance(error, Mismatch)
        assert "op 1 of group" in str(error)
        assert "broadcast" in str(error)
        assert "all_reduce" in str(error)


def test_options_that_differ_fail_the_join_on_all_ranks() -> None:
    cluster = Cluster([1, 1])
    cluster.join(options={1: GroupOptions(mode=Mode.SHARD)})
    assert all(isinstance(cluster.errors[rank], Mismatch) for rank in (0, 1))
    assert "shard" in str(cluster.errors[0])
    assert "auto" in str(cluster.errors[0])


def test_a_machine_that_never_joins_is_named_in_time() -> None:
    cluster = Cluster([1, 1])
    cluster.host_of[0].event(RankJoined(ConnId(0), cluster.join_request(0)))
    cluster.world.run(lambda: 0 in cluster.errors, 60)
    assert isinstance(cluster.errors[0], DeadlineExceeded)
    assert "machine B (rank 1)" in str(cluster.errors[0])
    assert any("waits for machine B (rank 1)" in note for note in cluster.notes)


def test_an_unreachable_machine_is_named_with_its_address() -> None:
    cluster = Cluster([1, 1])
    cluster.network.cut("A", "B")
    cluster.peers["B"].alive = False
    cluster.host_of[0].event(RankJoined(ConnId(0), cluster.join_request(0)))
    cluster.world.run(lambda: 0 in cluster.errors, 40)
    assert isinstance(cluster.errors[0], PeerUnreachable)
    assert "tcp://B:1" in str(cluster.errors[0])


def test_what_a_rank_handed_over_outlives_it() -> None:
    cluster = Cluster([1, 1], link=LinkModel(delay_s=0.1, rate=5e6))
    cluster.join()
    data = numbers(2, 300_000)
    cluster.post(0, sums(300_000), data[0])
    cluster.leave(0, clean=False, reason="was killed")
    cluster.post(1, sums(300_000), data[1])
    cluster.world.run(lambda: 1 in cluster.results[1], 30)
    assert cluster.results[1][1] == want(cluster, sums(300_000), data)


def test_a_clean_exit_after_the_last_op_troubles_nobody() -> None:
    cluster = Cluster([1, 1, 1])
    cluster.join()
    cast = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (3_000_000,), 0)
    payload = bytes(range(250)) * 12_000
    cluster.post(0, cast, payload)
    cluster.leave(0)
    cluster.world.advance(2.0)
    for rank in (1, 2):
        cluster.post(rank, cast, b"")
    cluster.world.run(lambda: all(1 in cluster.results[rank] for rank in (1, 2)), 30)
    assert cluster.results[1][1] == cluster.results[2][1] == payload
    assert not cluster.errors


def test_a_restarted_peer_takes_over() -> None:
    cluster = Cluster([1, 1])
    cluster.join()
    cluster.peers["B"].kill()
    cluster.world.advance(0.5)
    cluster.peers["B"].start()
    cluster.world.run(lambda: 0 in cluster.errors, 30)
    again = cluster.gid = type(cluster.gid)(bytes(16))
    assert again == bytes(16)
    cluster.errors.clear()
    cluster.joined.clear()
    cluster.results = {0: {}, 1: {}}
    cluster.seq = {0: 0, 1: 0}
    cluster.join()
    cluster.run(cluster.post_all(sums(5), numbers(2, 5)))
    assert cluster.results[0][1] == cluster.results[1][1]


@pytest.mark.parametrize("mode", [Mode.FAITHFUL, Mode.SHARD])
def test_memory_is_flat_over_many_ops(mode: Mode) -> None:
    cluster = Cluster([2, 1, 1], mode=mode)
    cluster.checks = False
    cluster.join()
    data = numbers(4, 8)
    for _ in range(300):
        cluster.run(cluster.post_all(sums(8), data))
    cluster.idle()
    for peer in cluster.peers.values():
        assert peer.plane.usage()["ops"] == 0
        assert len(peer.core.groups[cluster.gid].complete) == 0


def test_a_result_that_a_rank_has_not_read_outlives_the_group() -> None:
    """The rank was told that it is complete: what it copies out later must not be another op's bytes."""
    cluster = Cluster([3])
    cluster.consume_s = 5.0
    cluster.join()
    cast = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (1 << 20,), 0)
    for rank in (0, 1):
        cluster.post(rank, cast, bytes(1 << 20))
    cluster.world.run(lambda: 1 in cluster.results[1])
    cluster.leave(2, clean=False, reason="was killed")
    assert isinstance(cluster.errors[0], RankLost)
    plane = cluster.peers["A"].plane
    assert plane.usage()["ops"] == 1
    cluster.world.advance(6.0)
    assert plane.usage()["ops"] == 0


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_a_source_runs_ahead_of_its_receivers_by_a_bounded_number_of_ops(hosts: list[int]) -> None:
    cluster = Cluster(hosts)
    cluster.join()
    cast = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (64,), 0)
    window = cluster.peers["A"].settings.window
    while cluster.seq[0] - len(cluster.results[0]) < window and cluster.seq[0] < 1000:
        cluster.post(0, cast, bytes([cluster.seq[0] % 250]) * 64)
        cluster.world.advance(0.001)
    assert window < len(cluster.results[0]) <= 2 * window
    sent = cluster.seq[0]
    for _ in range(sent):
        cluster.post(1, cast, b"")
        cluster.world.advance(0.001)
    cluster.run()
    cluster.idle()
    assert [cluster.results[1][n + 1] for n in range(sent)] == [bytes([n % 250]) * 64 for n in range(sent)]
    counters = [peer.core.snapshot(cluster.world.now)["counters"] for peer in cluster.peers.values()]
    assert all(c["drops"] == c["duplicates"] == c["repairs_answered"] == 0 for c in counters)
