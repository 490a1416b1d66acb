"""Messages between simulated ranks on machines that lose, repeat, delay and damage: order, sizes, endings."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frogzmq.errors import Mismatch, RankLost
from frogzmq.proto.settings import CoreSettings
from frogzmq.sim.cluster import Cluster
from frogzmq.sim.network import LinkModel

SMALL = CoreSettings(chunk_bytes=16 << 10, credit_bytes=256 << 10)
BAD = LinkModel(delay_s=0.002, jitter_s=0.004, loss=0.1, duplicate=0.1, damage=0.02)


def content(src: int, dst: int, tag: int, count: int, size: int) -> bytes:
    return Random(f"{src} {dst} {tag} {count}").randbytes(size)


def joined(hosts: list[int], **options: object) -> Cluster:
    cluster = Cluster(hosts, **options)  # type: ignore[arg-type]
    cluster.join()
    assert not cluster.errors
    return cluster


def settled(cluster: Cluster) -> None:
    """Wait until no machine holds a message, then see that none of its bytes are left."""
    peers = list(cluster.peers.values())
    cluster.world.run(lambda: not any(g.mail.waiting() for p in peers for g in p.core.groups.values()))
    for peer in peers:
        assert peer.mail.buffers.usage() == {"messages": 0, "room_bytes": 0}


@pytest.mark.parametrize("size", [0, 4, 32 << 10, (32 << 10) + 1, 1_000_000])
@pytest.mark.parametrize("hosts", [[2], [1, 1]])
@pytest.mark.parametrize("first", ["send", "recv"])
def test_one_message(hosts: list[int], size: int, first: str) -> None:
    cluster = joined(hosts, settings=SMALL)
    data = content(0, 1, 5, 0, size)
    if first == "send":
        cluster.mail.send(0, 1, data, tag=5)
        cluster.world.advance(1.0)
    got = cluster.mail.receive(1, 0, size, tag=5)
    if first == "recv":
        cluster.world.advance(1.0)
        cluster.mail.send(0, 1, data, tag=5)
    cluster.world.run(lambda: got in cluster.mail.inbox)
    assert cluster.mail.inbox[got] == (0, data)
    settled(cluster)


def test_a_machine_keeps_its_messages_off_the_network() -> None:
    cluster = joined([2, 1])
    before = dict(cluster.network.sent_bytes)
    got = [cluster.mail.receive(1, 0, 1 << 20) for _ in range(3)]
    for count in range(3):
        cluster.mail.send(0, 1, content(0, 1, 0, count, 1 << 20))
    cluster.world.run(lambda: all(one in cluster.mail.inbox for one in got))
    assert max(sent - before.get(key, 0) for key, sent in cluster.network.sent_bytes.items()) < 4096


def test_large_messages_cross_once() -> None:
    cluster = joined([1, 1])
    size = 8 << 20
    got = cluster.mail.receive(1, 0, size)
    cluster.mail.send(0, 1, bytes(size))
    cluster.world.run(lambda: got in cluster.mail.inbox)
    assert cluster.network.sent_bytes["A", "B"] < 1.01 * size + 8192


def test_a_later_tag_overtakes_a_large_message() -> None:
    cluster = joined([1, 1], link=LinkModel(rate=1e6))
    cluster.mail.send(0, 1, bytes(4 << 20), tag=1)
    cluster.mail.send(0, 1, b"four", tag=2)
    got = cluster.mail.receive(1, 0, 4, tag=2)
    cluster.world.run(lambda: got in cluster.mail.inbox, limit_s=1.0)
    assert cluster.mail.inbox[got] == (0, b"four")
    large = cluster.mail.receive(1, 0, 4 << 20, tag=1)
    cluster.world.run(lambda: large in cluster.mail.inbox)


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_bytes_are_asked_for_when_they_are_waited_for(hosts: list[int]) -> None:
    cluster = joined(hosts)
    keys = [cluster.mail.send(0, 1, bytes([tag]) * 100_000, tag=tag, withhold=True) for tag in range(8)]
    for tag in reversed(range(8)):
        got = cluster.mail.receive(1, 0, 100_000, tag=tag)
        cluster.world.run(lambda got=got: got in cluster.mail.inbox)
        assert cluster.mail.inbox[got][1] == bytes([tag]) * 100_000
    cluster.world.run(lambda: all(key in cluster.mail.done for key in keys))


def test_many_small_messages_stay_within_the_room_for_them() -> None:
    cluster = joined([1, 1])
    count = 500
    for number in range(count):
        cluster.mail.send(0, 1, content(0, 1, 0, number, 30_000))
    cluster.world.advance(5.0)
    there = cluster.peers["B"].mail.buffers.usage()["messages"]
    assert 10 < there < 80, "unasked bytes are bounded"
    got = [cluster.mail.receive(1, 0, 30_000) for _ in range(count)]
    cluster.world.run(lambda: all(one in cluster.mail.inbox for one in got))
    for number, one in enumerate(got):
        assert cluster.mail.inbox[one] == (0, content(0, 1, 0, number, 30_000))
    settled(cluster)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_message_is_received_once_and_in_order(data: st.DataObject) -> None:
    hosts = data.draw(st.sampled_from([[2], [1, 1], [2, 1], [1, 1, 1], [2, 2]]))
    link = data.draw(st.sampled_from([LinkModel(), BAD]))
    seed = str(data.draw(st.integers(0, 1 << 20)))
    cluster = joined(hosts, settings=SMALL, link=link, seed=seed)
    mail, size = cluster.mail, cluster.size
    rank, tag = st.integers(0, size - 1), st.integers(0, 2)
    sizes = st.sampled_from([0, 1, 5000, 40_000, 100_000])
    plan = data.draw(st.lists(st.tuples(rank, rank, tag, st.booleans(), st.booleans()), max_size=30))
    bytes_of = {(dst, tag): data.draw(sizes) for dst in range(size) for tag in range(3)}
    actions: list[tuple[str, int, int, int, bool]] = []
    for src, dst, number, anyone, withhold in plan:
        actions.append(("send", src, dst, number, withhold))
        # Receives from whomever only where all of that tag are: else they might take another's message.
        actions.append(("recv", -1 if number == 2 else src, dst, number, anyone))
    order = data.draw(st.permutations(actions))
    sent: dict[tuple[int, int, int], int] = defaultdict(int)
    got: list[tuple[tuple[int, int], int, int, int]] = []
    for what, src, dst, number, flag in order:
        nbytes = bytes_of[dst, number]
        if what == "send":
            count = sent[src, dst, number]
            sent[src, dst, number] += 1
            mail.send(src, dst, content(src, dst, number, count, nbytes), tag=number, withhold=flag)
        else:
            got.append((mail.receive(dst, src, nbytes, tag=number), src, dst, number))
        if data.draw(st.booleans()):
            cluster.world.advance(0.003)
    cluster.world.run(lambda: all(one in mail.inbox for one, _, _, _ in got), limit_s=600)
    seen: dict[tuple[int, int, int], list[bytes]] = defaultdict(list)
    for one, src, dst, number in got:
        source, received = mail.inbox[one]
        assert src in (-1, source)
        seen[source, dst, number].append(received)
    for (src, dst, number), count in sent.items():
        want = [content(src, dst, number, i, bytes_of[dst, number]) for i in range(count)]
        assert seen[src, dst, number] == want
    settled(cluster)


def test_a_cut_link_loses_nothing() -> None:
    cluster = joined([1, 1], settings=SMALL)
    got = [cluster.mail.receive(1, 0, size, tag=size) for size in (10, 500_000)]
    cluster.network.cut("A", "B")
    cluster.mail.send(0, 1, content(0, 1, 0, 0, 500_000), tag=500_000)
    cluster.mail.send(0, 1, content(0, 1, 0, 1, 10), tag=10)
    cluster.world.advance(1.0)
    cluster.network.heal("A", "B")
    cluster.world.run(lambda: all(one in cluster.mail.inbox for one in got))
    settled(cluster)


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
@pytest.mark.parametrize(("size", "dtype"), [(8, "uint8"), (4, "int8"), (400_000, "uint8")])
def test_another_size_or_dtype_fails_both_by_name(hosts: list[int], size: int, dtype: str) -> None:
    cluster = joined(hosts)
    cluster.mail.send(0, 1, bytes(4), tag=3)
    got = cluster.mail.receive(1, 0, size, tag=3, dtype=dtype)
    cluster.world.run(lambda: len(cluster.errors) == 2)
    for error in cluster.errors.values():
        assert isinstance(error, Mismatch)
        assert f"rank 0 sent 4 bytes of uint8, rank 1 called recv for {size} bytes of {dtype}" in str(error)
    assert got not in cluster.mail.inbox


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_what_a_rank_sent_before_it_left_still_arrives(hosts: list[int]) -> None:
    cluster = joined(hosts)
    cluster.mail.send(0, 1, b"small", tag=1)
    cluster.mail.send(0, 1, bytes(1 << 20), tag=2)
    cluster.leave(0)
    cluster.world.advance(1.0)
    got = [cluster.mail.receive(1, 0, 1 << 20, tag=2), cluster.mail.receive(1, 0, 5, tag=1)]
    cluster.world.run(lambda: all(one in cluster.mail.inbox for one in got))
    none = cluster.mail.receive(1, 0, 5, tag=1)
    anyone = cluster.mail.receive(1, -1, 5, tag=1)
    cluster.world.run(lambda: none in cluster.mail.failed and anyone in cluster.mail.failed)
    for one in (none, anyone):
        assert isinstance(cluster.mail.failed[one], RankLost)
        assert "rank 0 (process 1000 on A) has left the group" in str(cluster.mail.failed[one])
    key = cluster.mail.send(1, 0, bytes(4))
    cluster.world.run(lambda: key in cluster.mail.unsent)
    cluster.leave(1)
    cluster.world.run(lambda: not any(peer.core.groups for peer in cluster.peers.values()))


@pytest.mark.parametrize("hosts", [[3], [1, 1, 1]])
def test_a_dead_rank_fails_what_waits(hosts: list[int]) -> None:
    cluster = joined(hosts)
    cluster.mail.receive(1, 0, 4)
    cluster.mail.send(2, 1, bytes(1 << 20), tag=9)
    cluster.leave(0, clean=False, reason="killed")
    cluster.world.run(lambda: {1, 2} <= set(cluster.errors))
    assert "rank 0 (process 1000 on A) failed" in str(cluster.errors[1])
    cluster.leave(1)
    cluster.leave(2)
    cluster.world.run(lambda: not any(peer.core.groups for peer in cluster.peers.values()))
    for peer in cluster.peers.values():
        assert peer.mail.buffers.usage() == {"messages": 0, "room_bytes": 0}


def test_a_dead_machine_fails_what_waits_for_it() -> None:
    cluster = joined([1, 1])
    cluster.mail.receive(1, 0, 4)
    cluster.peers["A"].kill()
    cluster.world.run(lambda: 1 in cluster.errors)
    assert isinstance(cluster.errors[1], RankLost)
    assert "machine A" in str(cluster.errors[1])


def test_messages_between_collectives_take_none_of_their_numbers() -> None:
    from frogzmq.descriptor import Descriptor
    from frogzmq.types import OpKind, ReduceOp

    cluster = joined([1, 1])
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "int32", (1,))
    got = cluster.mail.receive(1, 0, 4)
    for _ in range(3):
        cluster.mail.send(0, 1, b"mail")
    cluster.post_all(descriptor, [(1).to_bytes(4, "little"), (2).to_bytes(4, "little")])
    cluster.run()
    assert cluster.results[0] == {1: (3).to_bytes(4, "little")}
    cluster.world.run(lambda: got in cluster.mail.inbox)
    waits = cluster.peers["B"].core.snapshot(cluster.world.now)["groups"][0]["mail"]
    assert (waits["waits"], waits["received"]) == (2, 1)
    assert waits["waiting"][0] | {"age_s": 0} == {
        "what": "send", "rank": 0, "peer_rank": 1, "tag": 0, "bytes": 4, "dtype": "uint8", "age_s": 0,
    }  # fmt: skip


@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 2]])
@pytest.mark.parametrize("size", [100_000, 3 << 20])
def test_bytes_that_a_rank_is_reading_outlive_the_group(hosts: list[int], size: int) -> None:
    cluster = joined(hosts)
    cluster.mail.read_s = 5.0
    reader = cluster.host_of[2]
    got = cluster.mail.receive(2, 0, size)
    cluster.mail.send(0, 2, bytes(size))
    cluster.world.run(lambda: got in cluster.mail.inbox)
    cluster.leave(1, clean=False, reason="killed")
    cluster.world.run(lambda: 2 in cluster.errors)
    assert reader.mail.buffers.usage()["messages"] == 1
    cluster.world.advance(6.0)
    assert reader.mail.buffers.usage()["messages"] == 0


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_small_messages_are_asked_for_as_fast_as_they_are_read(hosts: list[int]) -> None:
    cluster = joined(hosts)
    mail, count = cluster.mail, 300
    mail.read_small_s = 0.01
    got = [mail.receive(1, 0, 20_000) for _ in range(count)]
    for number in range(count):
        mail.send(0, 1, content(0, 1, 0, number, 20_000), withhold=True)
    cluster.world.advance(0.005)
    if hosts == [2]:
        assert len(mail.inbox) == 64, "as many as a rank may leave unread"
    cluster.world.run(lambda: all(one in mail.inbox for one in got))
    assert [mail.inbox[one][1] for one in got] == [content(0, 1, 0, n, 20_000) for n in range(count)]
    settled(cluster)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_ends_nothing_is_left_and_nobody_hangs(data: st.DataObject) -> None:
    hosts = data.draw(st.sampled_from([[3], [1, 1], [2, 1], [1, 1, 1]]))
    link = data.draw(st.sampled_from([LinkModel(), LinkModel(loss=0.1, jitter_s=0.003)]))
    cluster = joined(hosts, settings=SMALL, link=link, seed=str(data.draw(st.integers(0, 1000))))
    mail, ranks = cluster.mail, list(range(cluster.size))
    there: list[int] = list(ranks)
    got: list[tuple[int, int]] = []
    from_oneself: dict[tuple[int, int], bool] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if len(there) < 2:
            break
        src, dst = data.draw(st.sampled_from(there)), data.draw(st.sampled_from(ranks))
        size = data.draw(st.sampled_from([0, 100, 40_000, 200_000]))
        what = data.draw(
            st.sampled_from(["send", "send", "withhold", "recv", "anyone", "leave", "wait", "wait"])
        )
        if what in ("send", "withhold"):
            mail.send(src, dst, bytes(size), tag=size, withhold=what == "withhold")
        elif what in ("recv", "anyone"):
            got.append(mail.receive(src, -1 if what == "anyone" else dst, size, tag=size))
            from_oneself[got[-1]] = what == "recv" and dst == src
        elif what == "leave":
            there.remove(src)
            cluster.leave(src, clean=data.draw(st.sampled_from([True, True, True, False])))
        else:
            cluster.world.advance(data.draw(st.sampled_from([1e-5, 0.003, 1.0])))
    cluster.world.advance(20.0)
    for rank in there[1:]:
        cluster.leave(rank)
    last = there[0] if there else -1

    def over(one: tuple[int, int]) -> bool:
        done = one in mail.inbox or one in mail.failed or one[0] in cluster.errors
        return done or one[0] != last or from_oneself[one]

    cluster.world.run(lambda: all(map(over, got)), limit_s=120)
    cluster.leave(last) if there else None
    cluster.world.run(lambda: not any(peer.core.groups for peer in cluster.peers.values()), limit_s=120)
    for peer in cluster.peers.values():
        assert peer.mail.buffers.usage() == {"messages": 0, "room_bytes": 0}
