"""Peers towards each other: strangers, garbage, other versions, encryption, stops under load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from support.fleet import Fleet, PeerProcess
from support.local import Local

from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire import frames, limits, ranks
from frogzmq.wire.messages import PROTOCOL, Hello, Identity, Ping, Refuse, Welcome

SUM = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (4,))
ME = Identity(peer="00000000000000aa", instance="1-x", name="tester", endpoints=[])
OTHER = PROTOCOL + 1


class Callers:
    """Callers at a peer's listeners, as other peers would be; all are gone after the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket] = []

    def dealer(
        self, endpoint: str, route: bytes = b"00000000000000aa:1-x:c", keys: tuple = (), server: str = ""
    ) -> zmq.Socket:
        """Connect to ``endpoint``, encrypted to ``server`` with our ``keys`` if those are given."""
        socket = self.context.socket(zmq.DEALER)
        self.sockets.append(socket)
        socket.identity = route
        socket.rcvtimeo = 10_000
        if keys:
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.curve_serverkey = server.encode()
        socket.connect(endpoint)
        return socket


@pytest.fixture
def callers() -> Iterator[Callers]:
    """A factory of raw ZeroMQ connections."""
    callers = Callers()
    yield callers
    callers.context.destroy(linger=0)


def counters(peer: PeerProcess) -> dict:
    return peer.peek()["counters"]


def pair(a: PeerProcess, b: PeerProcess, **changes: object) -> tuple[Local, Local]:
    """A group of one rank on each of two peers, joined; ``changes`` to what is told of both peers."""
    both = a.local(), b.local()
    who = [local.welcome.who.model_copy(update=changes) for local in both]
    for rank, local in enumerate(both):
        local.join(rank, who)
    for local in both:
        local.expect(ranks.Joined)
    return both


def test_two_peers_reduce_and_take_leave(fleet: Fleet) -> None:
    one, two = fleet.start(), fleet.start()
    a, b = pair(one, two)
    for seq in range(1, 4):
        for value, local in ((1, a), (2, b)):
            local.post(seq, SUM, np.full(4, value, np.float32).tobytes())
        for local in (a, b):
            assert bytes(local.expect(ranks.Result).payload) == np.full(4, 3, np.float32).tobytes()
    assert two.stop() == 0
    failed = a.expect(ranks.Failed)
    assert failed.code == "RankLost"
    assert "machine1" in failed.text


def test_peers_on_other_machines_talk_encrypted(fleet: Fleet) -> None:
    one, two = (fleet.start(config='advertise = ["127.0.0.1"]') for _ in range(2))
    a, b = pair(one, two, netns="elsewhere")
    descriptor = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "float32", (4,), 0)
    a.post(1, descriptor, bytes(range(16)))
    b.send(ranks.encode_post(1, 1, ranks.NODATA, 0, 0, 0, 0, descriptor.encoded))
    assert bytes(b.expect(ranks.Result).payload) == bytes(range(16))
    links = one.peek()["fabric"]["links"]
    assert [link["encrypted"] for link in links if link["up"]] == [True]


def test_a_key_that_nobody_named_is_not_let_in(fleet: Fleet, callers: Callers) -> None:
    peer = fleet.start()
    snapshot = peer.peek()
    outer = f"tcp://127.0.0.1:{snapshot['fabric']['port']}"
    socket = callers.dealer(outer, keys=zmq.curve_keypair(), server=snapshot["me"]["key"])
    socket.send(frames.encode(Hello(who=ME)))
    snapshot = peer.wait_for(lambda now: now["fabric"]["denied_keys"] >= 1)
    assert snapshot["peers"] == []
    assert "is not allowed here" in peer.text()


def test_a_member_cannot_speak_for_another(fleet: Fleet, callers: Callers) -> None:
    peer = fleet.start()
    public, secret = zmq.curve_keypair()
    snapshot = peer.peek()
    who = Identity.model_validate(snapshot["me"])
    stranger = ME.model_copy(update={"key": public.decode()})
    rank = peer.local()
    rank.join(0, [who, stranger])  # a local rank vouches for the key
    rank.peek()
    outer = f"tcp://127.0.0.1:{snapshot['fabric']['port']}"
    socket = callers.dealer(outer, b"00000000000000bb:1-x:c", (public, secret), who.key)
    socket.send(frames.encode(Hello(who=ME.model_copy(update={"peer": "00000000000000bb"}))))
    peer.wait_for(lambda now: now["counters"]["strangers"] >= 1)


def test_who_has_not_said_hello_is_not_heard(fleet: Fleet, callers: Callers) -> None:
    peer = fleet.start()
    socket = callers.dealer(peer.peek()["me"]["local_endpoint"])
    ping = frames.encode(Ping(nonce=1, sent=0.0))
    socket.send(ping)
    peer.wait_for(lambda now: now["counters"]["strangers"] == 1)
    socket.send(frames.encode(Hello(who=ME)))
    assert isinstance(frames.decode([socket.recv()]), Welcome)
    socket.send(ping)
    assert type(frames.decode([socket.recv()])).__name__ == "Pong"
    assert counters(peer)["strangers"] == 1


def test_garbage_is_counted_against_its_sender_and_nobody_else_notices(
    fleet: Fleet, callers: Callers
) -> None:
    peer = fleet.start()
    socket = callers.dealer(peer.peek()["me"]["local_endpoint"])
    socket.send(frames.encode(Hello(who=ME)))
    assert isinstance(frames.decode([socket.recv()]), Welcome)
    chunk = frames.MAGIC + bytes((PROTOCOL, 32))
    garbage = [
        [b""], [b"GET / HTTP/1.1"], [frames.MAGIC + bytes((PROTOCOL, 200))], [chunk], [chunk, b"x" * 100],
        [frames.MAGIC + bytes((PROTOCOL, 4)) + b"{"], [b"x"] * 40, [os.urandom(90), os.urandom(1000)],
        [frames.MAGIC + bytes((PROTOCOL, 4)) + b"{}" + bytes(limits.CONTROL_BYTES)],
    ]  # fmt: skip
    for parts in garbage:
        socket.send_multipart(parts)
    snapshot = peer.wait_for(lambda now: now["counters"]["rejected_frames"] >= len(garbage))
    assert snapshot["counters"]["rejected_frames"] == len(garbage)
    assert snapshot["counters"]["rejected_by_peer"] == {ME.peer: len(garbage)}
    a = peer.local()
    a.join(0, [a.welcome.who])
    a.expect(ranks.Joined)


def test_another_version_is_refused_with_both_versions(fleet: Fleet, callers: Callers) -> None:
    peer = fleet.start()
    socket = callers.dealer(peer.peek()["me"]["local_endpoint"])
    hello = bytearray(frames.encode(Hello(who=ME)))
    hello[2] = OTHER
    socket.send(bytes(hello))
    refuse = frames.decode([socket.recv()])
    assert isinstance(refuse, Refuse)
    assert refuse.code == "VersionMismatch"
    assert f"this side speaks {OTHER}" in refuse.text
    assert f"speaks {PROTOCOL};" in refuse.text


def test_peers_of_two_versions_both_say_so(fleet: Fleet) -> None:
    old = fleet.start()
    local = old.peek()["me"]["local_endpoint"]
    new = fleet.start(
        config=f'peers = ["{local}"]', before=f"import frogzmq.wire.messages as m; m.PROTOCOL = {OTHER}"
    )
    until = time.monotonic() + 15
    both = f"protocol version {OTHER}, this one {PROTOCOL}", f"protocol version {PROTOCOL}, this one {OTHER}"
    while not (both[0] in old.text() and both[1] in new.text()):
        assert time.monotonic() < until, fleet.logs()
        time.sleep(0.05)


def test_a_configured_address_where_nobody_is_does_no_harm(fleet: Fleet) -> None:
    peer = fleet.start(config='peers = ["tcp://127.0.0.1:9"]')
    row = peer.wait_for(lambda now: bool(now["peers"] and now["peers"][0]["tried"]))["peers"][0]
    assert "connection refused" in row["tried"]["tcp://127.0.0.1:9"]


def test_a_killed_peer_is_named_to_the_ranks_that_need_it(fleet: Fleet) -> None:
    one, two = fleet.start(), fleet.start(name="beta")
    a, _ = pair(one, two)
    a.post(1, SUM, bytes(16))
    started = time.monotonic()
    two.process.kill()
    failed = a.expect(ranks.Failed)
    assert time.monotonic() - started < 10
    assert failed.code == "RankLost"
    assert "beta" in failed.text


def test_sigterm_under_load_is_clean(fleet: Fleet) -> None:
    one, two = fleet.start(), fleet.start()
    a, b = pair(one, two)
    data = np.ones(4, np.float32).tobytes()
    for seq in range(1, 61):
        a.post(seq, SUM, data)
        b.post(seq, SUM, data)
    started = time.monotonic()
    assert one.stop() == 0
    assert time.monotonic() - started < 5
    assert not one.socket_path.exists()
    assert b.expect(ranks.Failed).code == "RankLost"
