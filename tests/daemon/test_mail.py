"""Messages between ranks without torch, over real peers: order, tags, sizes, many at once, endings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleet import Fleet
from support.light import LightJob, LightRank

from frogzmq.client.letters import ANY_RANK


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("mail")) as fleet:
        fleet.start()
        fleet.start()
        yield fleet


@pytest.fixture(params=[1, 2], ids=["one peer", "two peers"])
def peers(request: pytest.FixtureRequest, fleet: Fleet) -> list[Any]:
    return fleet.peers[: request.param]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LightJob]:
    with LightJob(tmp_path) as job:
        yield job


def test_sizes(job: LightJob, peers: list[Any]) -> None:
    def rank(me: LightRank) -> None:
        group = me.join(timeout_s=30)
        for size in (0, 4, 32768, 32769, 5_000_000, 64 << 20):
            data = np.arange(size, dtype=np.uint64).astype(np.uint8)
            if me.rank == 0:
                group.mail.send(1, 7, "uint8", data).wait()
            else:
                sink = np.zeros(size, np.uint8)
                group.mail.receive(0, 7, "uint8", [sink]).wait()
                assert (sink == data).all()
        group.close()

    ranks = job.start(rank, 2, peers)
    for one in ranks:
        one.finish(60)


def test_order_tags_and_any_source(job: LightJob, peers: list[Any]) -> None:
    def rank(me: LightRank) -> None:
        group = me.join(timeout_s=30)
        rng = np.random.default_rng(1)
        sizes = rng.integers(0, 100_000, 100)
        if me.rank == 0:
            sinks = [np.zeros(size, np.uint8) for size in sizes]
            late = [group.mail.receive(1, 1, "uint8", [sink]) for sink in sinks]
            first = np.zeros(4, np.uint8)
            group.mail.receive(1, 2, "uint8", [first]).wait()
            assert (first == 2).all()
            for number, (message, sink) in enumerate(zip(late, sinks, strict=True)):
                message.wait()
                assert (sink == number).all()
            seen = []
            for _ in range(2 * (me.size - 1)):
                sink = np.zeros(8, np.uint8)
                message = group.mail.receive(ANY_RANK, 3, "uint8", [sink])
                message.wait()
                assert (sink == message.source).all()
                seen.append(message.source)
            assert sorted(seen) == sorted([*range(1, me.size)] * 2)
        else:
            if me.rank == 1:
                sent = [
                    group.mail.send(0, 1, "uint8", np.full(size, n, np.uint8)) for n, size in enumerate(sizes)
                ]
                group.mail.send(0, 2, "uint8", np.full(4, 2, np.uint8)).wait()
                for message in sent:
                    message.wait()
            for _ in range(2):
                group.mail.send(0, 3, "uint8", np.full(8, me.rank, np.uint8)).wait()
        group.close()

    ranks = job.start(rank, 4, peers)
    for one in ranks:
        one.finish(60)


def test_a_killed_rank_fails_the_messages_of_all(job: LightJob, peers: list[Any]) -> None:
    def rank(me: LightRank) -> Any:
        group = me.join(timeout_s=60)
        if me.rank == 1:
            me.say("here")
            me.pause()
            return None
        waits = [group.mail.receive(1, 5, "uint8", [np.zeros(100_000, np.uint8)])]
        waits.append(group.mail.receive(ANY_RANK, 6, "uint8", [np.zeros(4, np.uint8)]))
        sent = group.mail.send(1, 7, "uint8", np.zeros(300 << 20, np.uint8))  # more than is given unasked
        me.say("waits")
        found = [me.error_of(message.wait) for message in (*waits, sent)]
        return [*found, me.error_of(lambda: group.mail.send(0, 0, "uint8", np.zeros(4, np.uint8)))]

    ranks = job.start(rank, 3, peers, processes=[1])
    for one in ranks:
        one.expect("here" if one is ranks[1] else "waits")
    ranks[1].kill()
    for one in (ranks[0], ranks[2]):
        for name, text, _ in one.finish(30):
            assert name == "RankLost"
            assert f"rank 1 (process {ranks[1].pid} on" in text


def test_a_killed_peer_fails_the_messages_to_its_ranks(job: LightJob, fleet: Fleet) -> None:
    def rank(me: LightRank) -> Any:
        group = me.join(timeout_s=60)
        message = group.mail.receive(1 - me.rank, 5, "uint8", [np.zeros(4, np.uint8)])
        me.say("waits")
        return me.error_of(message.wait)

    extra = fleet.start()
    ranks = job.start(rank, 2, [fleet.peers[0], extra])
    for one in ranks:
        one.expect("waits")
    extra.process.kill()
    assert ranks[0].finish(30)[0] == "RankLost"
    assert ranks[1].finish(30)[0] == "PeerUnreachable"
    fleet.peers.remove(extra)
    extra.process.wait()


def test_what_nobody_reads_is_bounded(job: LightJob, peers: list[Any]) -> None:
    """Receives posted long before, messages of all sizes, and a receiver that reads nothing meanwhile."""

    def rank(me: LightRank) -> None:
        group = me.join(timeout_s=60)
        count = 400
        if me.rank == 0:
            sent = [group.mail.send(1, 0, "uint8", np.full(30_000, n % 251, np.uint8)) for n in range(count)]
            me.say("sent")
            for message in sent:
                message.wait()
        else:
            sinks = [np.zeros(30_000, np.uint8) for _ in range(count)]
            waits = [group.mail.receive(0, 0, "uint8", [sink]) for sink in sinks]
            me.pause()
            for number, (message, sink) in enumerate(zip(waits, sinks, strict=True)):
                message.wait()
                assert (sink == number % 251).all()
        group.close()

    first, second = job.start(rank, 2, peers)
    first.expect("sent")
    state = peers[-1].peek()["groups"][-1]["mail"]
    assert state["received"] <= 64, "no more is on its way to a rank that does not read"
    second.go()
    first.finish(30)
    second.finish(30)


@pytest.mark.parametrize("what", ["skips", "unknown", "dtype", "early bytes", "too many bytes", "receive"])
def test_a_rank_that_breaks_the_protocol_is_disconnected(job: LightJob, fleet: Fleet, what: str) -> None:
    def rank(me: LightRank, what: str) -> Any:
        from frogzmq.wire import ranks as wire

        group = me.join(timeout_s=30)
        if me.rank == 0:
            datagrams = {
                "skips": wire.encode_mail(group.handle, 2, 0, 1, 0, 4, "uint8"),
                "unknown": wire.encode_mail(group.handle, 1, 0, 7, 0, 4, "uint8"),
                "dtype": wire.encode_mail(group.handle, 1, 0, 1, 0, 4, "nothing"),
                "early bytes": wire.encode_mail_bytes(group.handle, 1, 0, 1, 0, 0, 4),
                "too many bytes": wire.encode_mail(group.handle, 1, 0, 1, 0, 4, "uint8"),
                "receive": wire.encode_receive(group.handle, 5, 1, 0, 4, "uint8"),
            }
            me.client.connection.send(datagrams[what])
            if what == "too many bytes":
                me.client.connection.send(wire.encode_mail_bytes(group.handle, 1, 0, 1, 0, 0, 5))
        sink = np.zeros(4, np.uint8)
        return me.error_of(lambda: group.mail.receive(1 - me.rank, 0, "uint8", [sink]).wait())

    first, second = job.start(rank, 2, fleet.peers[:1], what)
    assert first.finish(30)[0] in ("PeerUnreachable", "RankLost")
    assert second.finish(30)[0] == "RankLost"
