"""Receipts under the simulator: bytes that change after folding, ranks that read wrong, lost words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frogzmq.content.ledger import Difference, first_difference
from frogzmq.descriptor import Descriptor
from frogzmq.errors import IntegrityError, Mismatch, RankLost
from frogzmq.proto.receipts import KEPT
from frogzmq.proto.report import receipts_of
from frogzmq.sim.cluster import Cluster
from frogzmq.sim.network import LinkModel
from frogzmq.types import Mode, OpKind, Order, ReduceOp
from frogzmq.wire.messages import GroupOptions

KINDS = [kind for kind in OpKind if kind != OpKind.BARRIER]
ROOTED = (OpKind.BROADCAST, OpKind.REDUCE, OpKind.GATHER, OpKind.SCATTER)
FOLDED = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER)


BARRIER = Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,))


def make(kind: OpKind, count: int) -> Descriptor:
    reduce = ReduceOp.SUM if kind in FOLDED else ReduceOp.NONE
    return Descriptor(kind, reduce, "int32", (count,), 0 if kind in ROOTED else -1)


def inputs(descriptor: Descriptor, ranks: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [rng.bytes(max(descriptor.gives(rank, ranks), 0)) for rank in range(ranks)]


def run(cluster: Cluster, descriptor: Descriptor, times: int = 1) -> None:
    for _ in range(times):
        cluster.run(cluster.post_all(descriptor, inputs(descriptor, cluster.size)))


def logs(cluster: Cluster) -> list[list[dict[str, Any]]]:
    return [receipts_of(peer.core.groups[cluster.gid]) for peer in cluster.peers.values()]


def difference(cluster: Cluster) -> Difference | None:
    return first_difference(logs(cluster))


def flip_after_folding(cluster: Cluster, name: str, op: int) -> None:
    """One bit of a machine's result changes after it was folded, before anybody reads it."""
    plane = cluster.peers[name].plane
    fold = plane.fold

    def faulty(gid: Any, seq: int, piece: int, leaves: bool) -> Any:
        digest = fold(gid, seq, piece, leaves)
        if seq == op and piece == 0:
            plane.result_bytes(gid, seq)[5] ^= 4
        return digest

    plane.fold = faulty  # type: ignore[method-assign]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 2, 3]], ids=str)  # C035: any split of ranks
@pytest.mark.parametrize("count", [6, 60_000])
def test_every_kind_is_agreed_on(hosts: list[int], kind: OpKind, count: int, verify: bool) -> None:
    cluster = Cluster(hosts, receipts=not verify, verify=verify)
    cluster.join()
    run(cluster, make(kind, count), 2)
    cluster.idle()
    cluster.world.advance(0.5)
    assert not cluster.errors
    for log in logs(cluster):
        assert [(row["seq"], row["state"]) for row in log] == [(1, "agreed"), (2, "agreed")]
    assert difference(cluster) is None
    if verify:
        assert all(cluster.verified[rank] == [1, 2] for rank in range(cluster.size))
    assert all(peer.plane.usage()["ops"] == 0 for peer in cluster.peers.values())


def test_receipts_are_the_same_on_all_machines_and_in_all_modes() -> None:
    """The result's root does not depend on how the bytes travelled, or on how many machines there are."""
    results = set()
    for hosts in ([4], [2, 2], [1, 1, 1, 1]):
        for mode in Mode:
            cluster = Cluster(hosts, mode=mode, order=Order.RANK, receipts=True)
            cluster.join()
            run(cluster, make(OpKind.ALL_REDUCE, 700_000))
            cluster.world.advance(0.5)
            rows = [log[0] for log in logs(cluster)]
            assert len({row["receipt"] for row in rows}) == 1
            assert rows[0]["receipt"]
            assert {root for row in rows for root in row["got"].values()} == {rows[0]["result"]}
            results.add(rows[0]["result"])
    assert len(results) == 1


def test_bytes_flipped_after_folding_are_found_and_the_machine_is_named() -> None:
    cluster = Cluster([1, 1, 1], mode=Mode.FAITHFUL, receipts=True)
    cluster.join()
    flip_after_folding(cluster, "B", 2)
    run(cluster, make(OpKind.ALL_REDUCE, 1000), 3)
    cluster.world.advance(0.5)
    assert not cluster.errors  # asked for receipts, not for a check
    assert cluster.results[1][2] != cluster.results[0][2]
    found = difference(cluster)
    assert found is not None
    assert (found.seq, found.machines, found.ranks) == (2, ("B",), (1,))
    assert any("op 2" in note and "machine B (rank 1)" in note for note in cluster.notes)


@pytest.mark.parametrize("count", [10, 300_000])
def test_verify_fails_the_op_on_every_rank_and_names_the_machine(count: int) -> None:
    cluster = Cluster([2, 1, 1], mode=Mode.FAITHFUL, verify=True)
    cluster.join()
    flip_after_folding(cluster, "C", 2)
    run(cluster, make(OpKind.ALL_REDUCE, count))
    cluster.post_all(make(OpKind.ALL_REDUCE, count), inputs(make(OpKind.ALL_REDUCE, count), 4))
    cluster.world.run(lambda: len(cluster.errors) == 4, 30)
    assert all(cluster.verified[rank] == [1] for rank in range(4))
    texts = {str(error) for error in cluster.errors.values()}
    assert all(isinstance(error, IntegrityError) for error in cluster.errors.values())
    assert texts == {
        f"op 2 all_reduce(SUM) of int32[{count}] of group 'default': machine C (rank 3) has another result "
        "than it should"
    }
    cluster.world.advance(1.0)
    assert all(peer.plane.usage()["ops"] == 0 for peer in cluster.peers.values())


@pytest.mark.parametrize("hosts", [[3], [2, 1]], ids=str)
@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.ALL_TO_ALL, OpKind.BROADCAST])
def test_a_rank_that_reads_wrong_is_named(kind: OpKind, hosts: list[int]) -> None:
    cluster = Cluster(hosts, verify=True)
    cluster.join()
    cluster.read = lambda rank, seq, data: bytes([data[0] ^ 1]) + data[1:] if rank == 2 else data  # type: ignore[method-assign]
    cluster.post_all(make(kind, 60_000), inputs(make(kind, 60_000), 3))
    cluster.world.run(lambda: len(cluster.errors) == 3, 30)
    for error in cluster.errors.values():
        assert isinstance(error, IntegrityError)
        assert "op 1" in str(error)
        assert "rank 2 got other bytes" in str(error)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from(list(Mode)))
def test_verified_ops_survive_a_bad_network(seed: int, mode: Mode) -> None:
    link = LinkModel(delay_s=0.01, jitter_s=0.01, rate=50e6, damage=0.05)
    cluster = Cluster([1, 2, 1], seed=str(seed), link=link, mode=mode, verify=True)
    cluster.join()
    run(cluster, make(OpKind.ALL_REDUCE, 100_000), 2)
    cluster.idle()
    assert not cluster.errors
    assert difference(cluster) is None


def test_a_receipt_that_was_lost_is_asked_for() -> None:
    cluster = Cluster([1, 1], verify=True)
    cluster.join()
    first = cluster.peers["A"]
    tell, lost = first.core.groups[cluster.gid].ledger._tell, []  # type: ignore[union-attr]

    def forgetful(host: int, seq: int, said: Any, ask: bool, out: list[Any]) -> None:
        if lost:
            tell(host, seq, said, ask, out)
        else:
            lost.append(seq)

    first.core.groups[cluster.gid].ledger._tell = forgetful  # type: ignore[union-attr, method-assign]
    run(cluster, make(OpKind.ALL_REDUCE, 100))
    cluster.world.run(lambda: cluster.verified.keys() == {0, 1}, 30)
    assert lost == [1]


def test_a_machine_that_dies_before_it_has_spoken_fails_the_op_by_name() -> None:
    cluster = Cluster([1, 1], verify=True)
    cluster.join()
    cluster.consume_s = 60.0  # rank 1 never says what it got
    descriptor = make(OpKind.ALL_REDUCE, 100)
    cluster.post_all(descriptor, inputs(descriptor, 2))
    cluster.world.run(lambda: all(1 in cluster.results[rank] for rank in (0, 1)), 10)
    assert not cluster.verified
    cluster.peers["B"].kill()
    cluster.world.run(lambda: 0 in cluster.errors, 30)
    assert isinstance(cluster.errors[0], RankLost)
    assert "machine B" in str(cluster.errors[0])


def test_an_op_that_waits_for_a_receipt_says_so() -> None:
    cluster = Cluster([1, 1], verify=True)
    cluster.join()
    cluster.consume_s = 60.0
    descriptor = make(OpKind.ALL_REDUCE, 100)
    cluster.post_all(descriptor, inputs(descriptor, 2))
    cluster.world.advance(1.0)
    text = cluster.peers["A"].core.explain(cluster.gid, 1, cluster.world.now)
    assert "waits for the receipts of machine A (rank 0), machine B (rank 1)" in text


def test_the_log_is_bounded() -> None:
    cluster = Cluster([2], receipts=True)
    cluster.checks = False
    cluster.join()
    for count in range(KEPT + 30):
        run(cluster, make(OpKind.ALL_REDUCE, 1) if count % 2 else BARRIER)
    (log,) = logs(cluster)
    assert KEPT - 1 <= len(log) <= KEPT + 1
    assert log[-1]["seq"] == KEPT + 30


def test_without_receipts_nothing_is_hashed_that_stays_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("hashed")

    monkeypatch.setattr("frogzmq.dataplane.opbuffers.digest_chunk", never)
    monkeypatch.setattr("frogzmq.dataplane.plane.tensor_root", never)
    cluster = Cluster([3])
    cluster.join()
    run(cluster, make(OpKind.ALL_REDUCE, 300_000), 2)
    run(cluster, make(OpKind.ALL_REDUCE, 10), 2)
    assert not cluster.errors
    assert cluster.peers["A"].core.groups[cluster.gid].ledger is None


def test_machines_must_agree_on_receipts() -> None:
    cluster = Cluster([1, 1])
    cluster.join(options={1: GroupOptions(verify=True)})
    assert all(isinstance(cluster.errors[rank], Mismatch) for rank in (0, 1))
