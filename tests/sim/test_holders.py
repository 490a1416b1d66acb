"""What does not come from whoever makes it is fetched from whoever announced that it holds it."""

from __future__ import annotations

import numpy as np
import pytest
from support.reference import reference

from frogzmq.descriptor import Descriptor
from frogzmq.errors import RankLost
from frogzmq.plan.plan import make_hosts
from frogzmq.sim.cluster import Cluster
from frogzmq.sim.network import LinkModel
from frogzmq.types import Mode, OpKind, ReduceOp
from frogzmq.wire.messages import Have

COUNT = 700_000
SUM = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (COUNT,))
CAST = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "float32", (COUNT,), 0)
LOST = LinkModel(loss=1.0)
"""Control messages pass, chunks never arrive: a path on which large packets vanish."""


def make(
    hosts: list[int], mode: Mode = Mode.FAITHFUL, link: LinkModel | None = None
) -> tuple[Cluster, list[bytes]]:
    """Machines whose group has formed, and what each rank gives."""
    cluster = Cluster(hosts, mode=mode, link=link)
    cluster.join()
    rng = np.random.default_rng(5)
    return cluster, [rng.standard_normal(COUNT).astype(np.float32).tobytes() for _ in range(cluster.size)]


def total(cluster: Cluster, descriptor: Descriptor, data: list[bytes]) -> bytes:
    hosts = make_hosts({rank: peer.id for rank, peer in cluster.host_of.items()})
    return bytes(reference(descriptor, data, [host.ranks for host in hosts], cluster.options.order))


def answered(cluster: Cluster, name: str) -> int:
    """Chunks that a machine sent because they were asked of it."""
    return cluster.peers[name].core.stats.repairs_answered


def test_a_part_whose_owner_has_no_path_comes_from_a_third_machine() -> None:
    cluster, data = make([1, 1, 1])
    cluster.network.cut("A", "B")
    started = cluster.world.now
    cluster.run(cluster.post_all(SUM, data))
    assert [cluster.results[rank][1] for rank in range(3)] == [total(cluster, SUM, data)] * 3
    assert cluster.world.now - started < 3.0  # the machines at the cut ends are not given up before 12 s
    assert answered(cluster, "C") == 6  # three chunks to A, three to B
    assert not cluster.errors


@pytest.mark.parametrize("descriptor", [SUM, CAST])
def test_pieces_of_the_result_come_from_another_receiver(descriptor: Descriptor) -> None:
    cluster, data = make([1, 1, 1, 1], Mode.SHARD, LinkModel(delay_s=0.05))
    cluster.post_all(descriptor, data)
    cluster.world.advance(0.03)  # contributions are on their way to whoever folds them
    for name in ("A", "C", "D"):
        cluster.network.set(name, "B", LinkModel(delay_s=0.05, loss=1.0))
    cluster.world.advance(0.3)
    cluster.network.set("C", "B", LinkModel(delay_s=0.05))
    cluster.run()
    assert cluster.results[1][1] == total(cluster, descriptor, data)
    assert answered(cluster, "C") > 1  # its own piece, and others'
    cluster.idle()


def test_announcements_are_acted_upon_while_another_rank_is_late() -> None:
    """Nobody can be past the op, so only ``Have`` tells that C holds what A could not send to B."""
    cluster, data = make([1, 1, 1, 1])
    cluster.network.set("A", "B", LOST)
    cluster.post_all(SUM, data, [0.0, 0.0, 0.0, 6.0])
    cluster.world.advance(4.0)
    assert answered(cluster, "C") == 3
    lacking = cluster.peers["B"].core.groups[cluster.gid].ops[1].lacking()
    assert list(lacking) == [3]  # of the machine whose rank has not called yet
    cluster.run()
    assert not cluster.errors


def test_who_is_asked_does_not_hold_it_and_the_next_one_does() -> None:
    cluster, data = make([1, 1, 1, 1])
    for name in ("A", "C"):
        cluster.network.set(name, "B", LOST)
    cluster.run(cluster.post_all(SUM, data))
    assert cluster.results[1][1] == total(cluster, SUM, data)
    assert answered(cluster, "D") >= 6


def test_what_a_dead_machine_gave_to_one_reaches_all() -> None:
    cluster, data = make([1, 1, 1])
    cluster.network.set("A", "B", LOST)
    cluster.post_all(SUM, data)
    cluster.world.run(lambda: 1 in cluster.results[2])
    cluster.world.advance(0.1)
    cluster.peers["A"].kill()
    cluster.world.run(lambda: 1 in cluster.results[1], 10.0)
    assert cluster.results[1][1] == total(cluster, SUM, data)
    cluster.world.run(lambda: {1, 2} <= cluster.errors.keys(), 10.0)  # the next op fails
    for rank in (1, 2):
        assert isinstance(cluster.errors[rank], RankLost)
        assert "machine A" in str(cluster.errors[rank])


def test_a_holder_that_cannot_give_it_after_all_does_not_keep_the_others_waiting() -> None:
    cluster, data = make([1, 1, 1])
    cluster.network.set("A", "B", LOST)
    cluster.network.set("C", "B", LOST)
    cluster.post_all(SUM, data)
    cluster.world.run(lambda: 1 in cluster.results[2])
    cluster.world.advance(0.1)
    cluster.peers["A"].kill()
    started = cluster.world.now
    cluster.world.run(lambda: 1 in cluster.errors, 20.0)
    assert cluster.world.now - started < 8.0
    assert isinstance(cluster.errors[1], RankLost)
    assert "machine A" in str(cluster.errors[1])
    assert 1 not in cluster.results[1]


def test_what_is_kept_about_holders_is_bounded_by_the_plan() -> None:
    cluster, data = make([1, 1, 1])
    cluster.network.set("A", "B", LOST)
    cluster.network.set("C", "B", LOST)
    cluster.post_all(SUM, data)
    cluster.world.advance(0.3)
    group = cluster.peers["B"].core.groups[cluster.gid]
    host = group.host_of[cluster.peers["C"].id]
    for seq in (1, 2, 3, 1 << 40):
        parts = list(range(2000))
        group.have(host, Have(peer="0" * 16, gid=group.hex, seq=seq, parts=parts, results=True), 0.3)
    assert list(group.ops) == [1]
    assert sorted(group.ops[1].holders) == [-1, 0, 1, 2]
