"""Jobs go on, exactly, while others send what they should not; who sends damaged bytes is named."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import zmq
from support.fabrics import ZmqFabric
from support.fleet import Fleet, PeerProcess

from frogzmq.descriptor import Descriptor
from frogzmq.errors import IntegrityError
from frogzmq.types import Mode, OpKind, Order, ReduceOp
from frogzmq.wire import frames, limits, ranks
from frogzmq.wire.messages import PROTOCOL, Hello, Identity, Refuse, Welcome

ME = Identity(peer="00000000000000aa", instance="1-x", name="tester", endpoints=[])

FLIP = """
import frogzmq.daemon.fabric as fabric
real = fabric.Fabric.send_chunk
def send_chunk(self, peer, header, payload):
    if peer in {victims!r} or not {victims!r}:
        payload = bytearray(payload)
        payload[len(payload) // 2] ^= 1
    return real(self, peer, header, payload)
fabric.Fabric.send_chunk = send_chunk
"""


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A ZeroMQ context whose sockets are gone after the test."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def all_reduce(fabric: ZmqFabric, count: int) -> list:
    """Whole numbers, so that the sum is exact in any order; what every rank got."""
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (count,))
    data = [np.arange(count, dtype=np.float32) + rank for rank in range(len(fabric.placement))]
    return fabric.run([(descriptor, mine.tobytes()) for mine in data])


def exact(world: int, count: int) -> list[bytes]:
    """What ``all_reduce`` must give."""
    total = sum((np.arange(count, dtype=np.float32) + rank for rank in range(world)), np.float32(0))
    return [np.asarray(total, np.float32).tobytes()] * world


@pytest.mark.parametrize("count", [100, 700_000])
def test_a_damaged_chunk_is_dropped_counted_and_fetched_elsewhere(fleet: Fleet, count: int) -> None:
    a, b = fleet.start(name="alpha"), fleet.start(name="beta")
    victim = a.peek()["me"]["peer"]
    c = fleet.start(name="gamma", before=FLIP.format(victims=[victim]))
    fabric = ZmqFabric([0, 1, 2], Mode.FAITHFUL, Order.MACHINE, [a, b, c])
    try:
        assert all_reduce(fabric, count) == exact(3, count)
    finally:
        fabric.close()
    bad = c.peek()["me"]["peer"]
    counters = a.peek()["counters"]
    assert counters["rejected_by_peer"] == {bad: counters["rejected_chunks"]}
    assert counters["rejected_chunks"] >= 1
    assert b.peek()["counters"]["rejected_chunks"] == 0
    assert b.peek()["counters"]["repairs_answered"] >= 1
    assert f"from {bad} does not match its digest" in a.text()


@pytest.mark.parametrize("mode", [Mode.FAITHFUL, Mode.SHARD])
def test_with_no_honest_holder_the_machine_is_named(fleet: Fleet, mode: Mode) -> None:
    peers = [fleet.start(name="alpha"), fleet.start(name="beta")]
    peers.append(fleet.start(name="gamma", before=FLIP.format(victims=[])))
    fabric = ZmqFabric([0, 1, 2], mode, Order.MACHINE, peers)
    try:
        # In faithful mode the bad machine itself has got what it needs, from the others.
        for error in all_reduce(fabric, 300_000)[: 2 if mode == Mode.FAITHFUL else 3]:
            assert isinstance(error, IntegrityError)
            assert "machine gamma (rank 2)" in str(error)
            assert "damaged" in str(error)
    finally:
        fabric.close()
    again = ZmqFabric([0, 1], mode, Order.MACHINE, peers)  # who has nothing to do with it goes on
    try:
        assert all_reduce(again, 300_000) == exact(2, 300_000)
    finally:
        again.close()


class Nuisance:
    """Sends garbage to all ports of a peer until stopped."""

    def __init__(self, peer: PeerProcess) -> None:
        snapshot = peer.peek()
        fabric = snapshot["fabric"]
        plain_pub = int(snapshot["me"]["pub_endpoints"][-1].rpartition(":")[2])
        self.ports = [fabric["port"], fabric["pub_port"], fabric["local_port"], plain_pub]
        self.inner = snapshot["me"]["local_endpoint"]
        self.peer = peer
        self.rounds = 0
        self._stop = threading.Event()
        self._random = random.Random(7)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
        with zmq.Context() as context:
            while not self._stop.is_set():
                noise = self._random.randbytes(self._random.randrange(1, 3000))
                frame = b"\x02" + (1 << 62).to_bytes(8, "big") + noise  # "four exabytes follow"
                for port in self.ports:
                    for data in (noise, greeting + noise, greeting + frame, b"GET / HTTP/1.1\r\n\r\n", b""):
                        self._tcp(port, data)
                self._unix(noise)
                self._unix(b"\x01" + noise)
                self._zmq(context, noise)
                self.rounds += 1
                time.sleep(0.02)

    @staticmethod
    def _tcp(port: int, data: bytes) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(data)

    def _unix(self, data: bytes) -> None:
        with suppress(OSError), self.peer.local(hello=self._random.random() < 0.5) as local:
            local.sock.settimeout(5)
            local.send(data)
            local.ends()

    def _zmq(self, context: zmq.Context, noise: bytes) -> None:
        for route in (b"00000000000000aa:1-x:c", b"", noise[:200].replace(b"\0", b"x") or b"x"):
            with context.socket(zmq.DEALER) as sock:
                sock.linger = 50
                if route:
                    sock.identity = route
                sock.connect(self.inner)
                sock.send(frames.encode(Hello(who=ME)))
                sock.send_multipart([frames.MAGIC + bytes((PROTOCOL, 32)) + noise, noise])
                sock.send_multipart([noise] * self._random.randrange(1, 20))
                sock.send(frames.MAGIC + bytes((PROTOCOL, self._random.randrange(0, 40))) + noise)
                sock.poll(20)

    def stop(self) -> int:
        """End it; how many rounds there were."""
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.rounds


def test_garbage_at_every_port_while_a_job_runs(fleet: Fleet) -> None:
    peers = [fleet.start(ready=False) for _ in range(2)]
    peers = [peer.wait_ready() for peer in peers]
    fabric = ZmqFabric([0, 1], Mode.AUTO, Order.MACHINE, peers)
    before = peers[0].peek()["process"]
    nuisance = Nuisance(peers[0])
    try:
        until = time.monotonic() + 4
        jobs = 0
        while time.monotonic() < until or nuisance.rounds < 3:
            for count in (100, 300_000):
                assert all_reduce(fabric, count) == exact(2, count)
            jobs += 1
            assert time.monotonic() < until + 60
    finally:
        rounds = nuisance.stop()
        fabric.close()
    after = peers[0].peek()
    print(f"{jobs} rounds of the job in {rounds} rounds of garbage: {after['counters']}")
    assert after["counters"]["rejected_frames"] > 0
    assert after["counters"]["strangers"] > 0
    assert after["counters"]["rejected_chunks"] == 0
    assert after["process"]["rss_bytes"] - before["rss_bytes"] < 100 << 20
    assert "Traceback" not in peers[0].text()


def test_a_message_that_is_too_large_is_cut_off(fleet: Fleet, context: zmq.Context) -> None:
    peer = fleet.start()
    before = peer.peek()
    with context.socket(zmq.DEALER) as sock:
        sock.identity = b"00000000000000aa:1-x:c"
        sock.linger, sock.rcvtimeo = 0, 10_000
        with sock.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            sock.connect(before["me"]["local_endpoint"])
            sock.send(frames.encode(Hello(who=ME)))
            assert isinstance(frames.decode([sock.recv()]), Welcome)
            sock.send(bytes(64 << 20))
            assert monitor.poll(10_000), "the connection must be closed"
            sock.disable_monitor()
    after = peer.peek()
    assert after["process"]["rss_bytes"] - before["process"]["rss_bytes"] < 4 * limits.FRAME_BYTES
    a = peer.local()
    a.join(0, [a.welcome.who])
    a.expect(ranks.Joined)


def test_a_job_with_a_machine_of_another_version_fails_and_shows_both(
    fleet: Fleet, context: zmq.Context
) -> None:
    peer = fleet.start()
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        local = peer.local()
        me = local.welcome.who
        endpoint = f"tcp://127.0.0.1:{port}"
        far = ME.model_copy(update={"name": "delta", "netns": me.netns, "local_endpoint": endpoint})
        local.join(0, [me, far])
        assert router.poll(20_000), "the job's peer must be dialled"
        route, hello = router.recv_multipart()
        assert isinstance(frames.decode([hello]), Hello)
        refuse = bytearray(frames.encode(Refuse(code="VersionMismatch", text="no")))
        refuse[2] = PROTOCOL + 1
        router.send_multipart([route, bytes(refuse)])
        failed = local.expect(ranks.Failed)
    assert failed.code == "PeerUnreachable"
    assert "delta" in failed.text
    assert f"speaks {PROTOCOL + 1};" in failed.text
    assert f"this side speaks {PROTOCOL}," in failed.text
    assert f"version {PROTOCOL + 1}, this one {PROTOCOL}" in peer.text()
