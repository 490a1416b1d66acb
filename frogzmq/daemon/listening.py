"""Where other peers call: two ROUTERs, one PUB, and who may say what on them.

Two listeners: a plain one on 127.0.0.1 for peers in the same network namespace, and an outer one that
speaks CURVE (unless secrecy is off). Whatever arrives is decoded here: garbage is counted and dropped,
senders that have not said Hello are strangers, and on encrypted connections the claimed sender must own
the key.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import zmq

from frogzmq.daemon.auth import DOMAIN, Gate
from frogzmq.daemon.link import CONTROL_HWM, Caller, ZmqSocket, bounded
from frogzmq.daemon.sockets import BUDGET, Sockets, bind, rest
from frogzmq.errors import VersionMismatch, WireError
from frogzmq.keys import peer_id_of
from frogzmq.machine import Event, Received, Stats
from frogzmq.types import PeerId
from frogzmq.wire import frames as codec
from frogzmq.wire.messages import CHUNK_KIND, ChunkHeader, Hello, Message, Refuse, Welcome

log = logging.getLogger("frogzmq.fabric")


@lru_cache(maxsize=4096)
def _owner(key: str) -> str:
    return str(peer_id_of(key))


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """Where to listen and how: see ``frogzmq.config.PeerConfig`` for the meaning of each."""

    bind: str = "0.0.0.0"
    port: int = 0
    pub_port: int = 0
    encrypted: bool = True
    lanes: int = 2


@dataclass(slots=True)
class Listener:
    """A ROUTER of ours; ``mark`` begins the route names of its callers."""

    socket: ZmqSocket
    mark: bytes
    encrypted: bool
    port: int


Chunk = Callable[[PeerId, ChunkHeader, memoryview], None]
Mismatch = Callable[[str, int], None]


class Listening(Sockets):
    """``sink`` takes events, ``on_chunk`` unverified chunks, ``on_mismatch`` other protocol versions."""

    def __init__(self, caller: Caller, settings: FabricSettings, stats: Stats, epoll: select.epoll) -> None:
        super().__init__(stats, epoll)
        self.caller, self.settings = caller, settings
        self.sink: Callable[[Event], None] = lambda event: None
        self.on_chunk: Chunk = lambda peer, header, payload: None
        self.on_mismatch: Mismatch = lambda who, version: None
        self._greeted: set[tuple[bytes, str, str]] = set()
        self.gate = Gate(self.context, {caller.public.decode()} if caller.public else set())
        try:
            self._listen()
        except BaseException:
            self.context.destroy(linger=None)
            raise
        self._watch(self.gate.socket, self._drain_gate)

    def _listen(self) -> None:
        settings = self.settings
        inner = bounded(self.context.socket(zmq.ROUTER), CONTROL_HWM)
        outer = bounded(self.context.socket(zmq.ROUTER), CONTROL_HWM)
        self.pub = bounded(self.context.socket(zmq.PUB), CONTROL_HWM)
        self._all = [inner, outer, self.pub]
        for router in (inner, outer):
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        inner_port = bind(inner, "127.0.0.1", 0, "port")
        self.local_pub_port = bind(self.pub, "127.0.0.1", 0, "pub_port")
        if settings.encrypted:
            for socket in (outer, self.pub):  # options hold for later binds only: the local PUB stays plain
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, self.caller.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self.caller.secret)
                socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        else:
            log.warning(
                "secrecy is off: what this peer sends to other machines and takes from them is unencrypted "
                "and unauthenticated; anyone who reaches %s can read and change it", settings.bind
            )  # fmt: skip
        outer_port = bind(outer, settings.bind, settings.port, "port")
        self.pub_port = bind(self.pub, settings.bind, settings.pub_port, "pub_port")
        self.inner = Listener(inner, b"i", False, inner_port)
        self.outer = Listener(outer, b"o", settings.encrypted, outer_port)
        for listener in (self.inner, self.outer):
            self._watch(listener.socket, lambda listener=listener: self._drain_router(listener))  # type: ignore[misc]

    # ----------------------------------------------------------------- arrivals
    def _drain_gate(self) -> bool:
        before = self.gate.denied
        self.gate.drain()
        self.stats.strangers += self.gate.denied - before
        return False

    def _drain_router(self, listener: Listener) -> bool:
        socket = listener.socket
        for _ in range(BUDGET):
            try:
                route = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._arrived(listener, route, rest(socket))
        return True

    def _arrived(self, listener: Listener, route: bytes, parts: list[zmq.Frame]) -> None:
        peer, instance, ok = _parse_route(route)
        if ok and listener.encrypted:
            ok = bool(parts) and _owner(str(parts[0].get("User-Id"))) == peer
        if not ok or not parts:
            self.stats.strangers += 1
            return
        greeted = (listener.mark, peer, instance) in self._greeted
        head = parts[0].bytes
        if not greeted and head[:2] == codec.MAGIC and head[3:4] != bytes((Hello.KIND,)):
            self.stats.strangers += 1
            return
        try:
            if head[3:4] == bytes((CHUNK_KIND,)) and len(parts) == 2:
                payload = parts[1].buffer
                decoded = codec.decode((head, payload))
            else:
                decoded = codec.decode([head, *(part.bytes for part in parts[1:])])
        except VersionMismatch as error:
            text = str(VersionMismatch(error.theirs, error.ours, f"peer {self.caller.peer}"))
            self._send(listener.socket, (route, codec.encode(Refuse(code="VersionMismatch", text=text))))
            self.on_mismatch(peer, error.theirs)
            return
        except WireError as error:
            self.rejected(peer, error)
            return
        if isinstance(decoded, codec.ChunkFrame):
            self.on_chunk(PeerId(peer), decoded.header, payload)
        elif isinstance(decoded, Hello) and decoded.who.peer != peer:
            self.rejected(peer, WireError(f"Hello claims to be {decoded.who.peer}"))
        else:
            self.sink(Received(PeerId(peer), instance, listener.mark + route, decoded))

    def rejected(self, peer: str, error: Exception) -> None:
        """Count a frame that breaks the protocol, against its sender."""
        self.stats.rejected_frames += 1
        counts = self.stats.rejected_by_peer
        if peer in counts or len(counts) < 1024:
            counts[peer] = counts.get(peer, 0) + 1
        log.debug("dropped a frame from %s: %s", peer, error)

    def _decode_control(self, parts: list[bytes], who: str) -> Message | None:
        try:
            decoded = codec.decode(parts)
        except VersionMismatch as error:
            self.on_mismatch(who, error.theirs)
            return None
        except WireError as error:
            self.rejected(who, error)
            return None
        if isinstance(decoded, codec.ChunkFrame):
            self.rejected(who, WireError("chunk on a connection that carries none"))
            return None
        return decoded

    # ------------------------------------------------------------------ answers
    def reply(self, route: bytes, message: Message) -> None:
        """Answer on the connection that a message came by; ``Welcome`` also opens it for everything else."""
        listener = self.inner if route[:1] == self.inner.mark else self.outer
        if isinstance(message, Welcome):
            peer, instance, ok = _parse_route(route[1:])
            if ok:
                self._greeted.add((listener.mark, peer, instance))
        self._send(listener.socket, (route[1:], codec.encode(message)))

    def forget(self, peer: str) -> None:
        """``peer`` is gone: whoever comes under its name must say Hello first."""
        self._greeted = {entry for entry in self._greeted if entry[1] != peer}

    def publish(self, message: Message) -> None:
        """Announce to all subscribers; dropped where one is slow."""
        self.pub.send(codec.encode(message), zmq.NOBLOCK)


def _parse_route(route: bytes) -> tuple[str, str, bool]:
    """Peer, instance, and whether the name has the form ``peer:instance:lane`` at all."""
    try:
        peer, instance, _ = route.decode("ascii").split(":")
    except ValueError:
        return "", "", False
    return peer, instance, len(peer) == 16 and bool(instance)
