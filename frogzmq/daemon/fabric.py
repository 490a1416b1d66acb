"""The network side of a peer: all ZeroMQ sockets, owned by the loop's thread.

Two listeners: a plain one on 127.0.0.1 for peers in the same network namespace, and an outer one that
speaks CURVE (unless secrecy is off). Messages to a peer leave by the DEALER that we dialled to it, chunks
by its bulk lanes; announcements leave by one PUB and come in by one SUB per peer, so that the sender of
each is known. Whatever arrives is decoded here: garbage is counted and dropped, senders that have not
said Hello are strangers, and on encrypted connections the claimed sender must own the key.

Queues are bounded by high-water marks; what does not fit is dropped and counted (``stats.drops``), which
only happens to a peer that takes nothing off its links: repair and probing deal with it.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import zmq

from frogzmq.daemon.auth import DOMAIN, Gate
from frogzmq.daemon.link import CONTROL_HWM, Caller, Link, ZmqContext, ZmqSocket, bounded, encrypt_client
from frogzmq.errors import ConfigError, VersionMismatch, WireError
from frogzmq.keys import peer_id_of
from frogzmq.machine import Event, LinkDown, LinkReceived, LinkUp, Received, Stats
from frogzmq.types import PeerId
from frogzmq.wire import frames as codec
from frogzmq.wire import limits
from frogzmq.wire.messages import CHUNK_KIND, ChunkHeader, Hello, Message, Refuse, Welcome

log = logging.getLogger("frogzmq.fabric")

SMALL_CHUNK = 32 << 10
"""Chunks up to this size use the control lane, so that they overtake bulk."""
_BUDGET = 64
"""Messages taken from one socket before the others get their turn."""
_CONTROL_KINDS = (Hello.KIND, Welcome.KIND, Refuse.KIND)


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


class Fabric:
    """``sink`` takes events, ``on_chunk`` unverified chunks, ``on_mismatch`` other protocol versions."""

    def __init__(self, caller: Caller, settings: FabricSettings, stats: Stats, epoll: select.epoll) -> None:
        self.caller, self.settings, self.stats = caller, settings, stats
        self.sink: Callable[[Event], None] = lambda event: None
        self.on_chunk: Chunk = lambda peer, header, payload: None
        self.on_mismatch: Mismatch = lambda who, version: None
        self._epoll = epoll
        self._by_fd: dict[int, Callable[[], bool]] = {}
        self._fds: dict[ZmqSocket, int] = {}
        self._dirty: set[int] = set()
        self.links: dict[str, Link] = {}
        self.attached: dict[str, Link] = {}
        self._subs: dict[str, tuple[str, ZmqSocket]] = {}
        self._greeted: set[tuple[bytes, str, str]] = set()
        self.context: ZmqContext = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, 16_384)
        self.gate = Gate(self.context, {caller.public.decode()} if caller.public else set())
        try:
            self._listen()
        except BaseException:
            self.close()
            raise
        self._watch(self.gate.socket, self._drain_gate)

    # ---------------------------------------------------------------- listening
    def _listen(self) -> None:
        settings = self.settings
        inner = bounded(self.context.socket(zmq.ROUTER), CONTROL_HWM)
        outer = bounded(self.context.socket(zmq.ROUTER), CONTROL_HWM)
        self.pub = bounded(self.context.socket(zmq.PUB), CONTROL_HWM)
        self._all = [inner, outer, self.pub]
        for router in (inner, outer):
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        inner_port = _bind(inner, "127.0.0.1", 0, "port")
        self.local_pub_port = _bind(self.pub, "127.0.0.1", 0, "pub_port")
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
        outer_port = _bind(outer, settings.bind, settings.port, "port")
        self.pub_port = _bind(self.pub, settings.bind, settings.pub_port, "pub_port")
        self.inner = Listener(inner, b"i", False, inner_port)
        self.outer = Listener(outer, b"o", settings.encrypted, outer_port)
        for listener in (self.inner, self.outer):
            self._watch(listener.socket, lambda listener=listener: self._drain_router(listener))  # type: ignore[misc]

    def _watch(self, socket: ZmqSocket, drain: Callable[[], bool]) -> None:
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fds[socket] = fd
        self._by_fd[fd] = drain
        self._epoll.register(fd, select.EPOLLIN)
        self._dirty.add(fd)

    def _unwatch(self, socket: ZmqSocket) -> None:
        fd = self._fds.pop(socket)
        del self._by_fd[fd]
        self._dirty.discard(fd)
        self._epoll.unregister(fd)

    # ------------------------------------------------------------------ polling
    def touch(self, fd: int) -> bool:
        """Note that the poll loop saw ``fd`` readable; whether it is one of ours."""
        if fd in self._by_fd:
            self._dirty.add(fd)
            return True
        return False

    def drain(self) -> bool:
        """Read what has arrived; ``True``: call again before polling.

        A ZeroMQ descriptor tells of new commands, not of messages that are there, and sending may use a
        command up. So every socket that was reported or used since the last call is read till it is empty.
        """
        if not self._dirty:
            return False
        dirty, self._dirty = self._dirty, set()
        for fd in dirty:
            drain = self._by_fd.get(fd)
            if drain is not None and drain():
                self._dirty.add(fd)
        return bool(self._dirty)

    def _drain_gate(self) -> bool:
        before = self.gate.denied
        self.gate.drain()
        self.stats.strangers += self.gate.denied - before
        return False

    def _drain_router(self, listener: Listener) -> bool:
        socket = listener.socket
        for _ in range(_BUDGET):
            try:
                route = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._arrived(listener, route, _rest(socket))
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

    def _drain_link(self, link: Link) -> bool:
        for _ in range(_BUDGET):
            if link.control.closed:  # what the last message said made the core hang up
                return False
            try:
                frame = link.control.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            extra = _rest(link.control) if frame.more else []
            message = self._decode_control([frame.bytes, *(part.bytes for part in extra)], link.endpoint)
            if isinstance(message, Welcome):
                link.instance = message.who.instance
            if message is not None:
                self.sink(LinkReceived(link.endpoint, message))
        return True

    def _drain_monitor(self, link: Link) -> bool:
        for up, reason in link.news():
            if self.links.get(link.endpoint) is not link:
                break  # hung up at the last piece of news, perhaps dialled anew
            self.sink(LinkUp(link.endpoint) if up else LinkDown(link.endpoint, reason))
        return False

    def _drain_sub(self, peer: str, socket: ZmqSocket) -> bool:
        for _ in range(_BUDGET):
            if socket.closed:
                return False
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            message = self._decode_control(parts, peer)
            if message is not None and message.KIND not in _CONTROL_KINDS:
                link = self.attached.get(peer)
                self.sink(Received(PeerId(peer), link.instance if link else "", b"", message))
        return True

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

    # -------------------------------------------------------------------- links
    def dial(self, endpoint: str, key: str) -> None:
        """Connect to ``endpoint``; its state arrives as ``LinkUp`` and ``LinkDown``."""
        if endpoint in self.links:
            self.hangup(endpoint)
        try:
            link = Link(self.context, self.caller, endpoint, key, self.settings.lanes)
        except zmq.ZMQError as error:
            self.sink(LinkDown(endpoint, f"cannot dial {endpoint}: {error.strerror}"))
            return
        self.links[endpoint] = link
        self.gate.allow(key)
        self._watch(link.control, lambda: self._drain_link(link))
        self._watch(link.monitor, lambda: self._drain_monitor(link))

    def hangup(self, endpoint: str) -> None:
        """Close the link to ``endpoint``, if there is one, and what is attached to it."""
        link = self.links.pop(endpoint, None)
        if link is None:
            return
        for peer in [peer for peer, other in self.attached.items() if other is link]:
            del self.attached[peer]
            self._unsubscribe(peer)
        self._unwatch(link.control)
        self._unwatch(link.monitor)
        link.close()

    def attach(self, peer: str, endpoint: str, pub_endpoint: str) -> None:
        """Send to ``peer`` by the link to ``endpoint`` and listen to its announcements."""
        link = self.links.get(endpoint)
        if link is None:
            return
        self.attached[peer] = link
        if pub_endpoint and self._subs.get(peer, ("",))[0] != pub_endpoint:
            self._unsubscribe(peer)
            socket = bounded(self.context.socket(zmq.SUB), CONTROL_HWM)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            encrypt_client(socket, self.caller, link.key)
            socket.connect(pub_endpoint)
            self._subs[peer] = (pub_endpoint, socket)
            self._watch(socket, lambda: self._drain_sub(peer, socket))

    def _unsubscribe(self, peer: str) -> None:
        entry = self._subs.pop(peer, None)
        if entry is not None:
            self._unwatch(entry[1])
            entry[1].close(0)

    # ------------------------------------------------------------------ sending
    def send_link(self, endpoint: str, message: Message) -> None:
        """Send on our link to ``endpoint``."""
        link = self.links.get(endpoint)
        if link is not None:
            self._send_control(link, message)

    def send(self, peer: str, message: Message) -> None:
        """Send to an attached peer."""
        link = self.attached.get(peer)
        if link is None:
            self.stats.drops += 1
        else:
            self._send_control(link, message)

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

    def send_chunk(self, peer: str, header: ChunkHeader, payload: Any) -> bool:
        """Send a chunk to an attached peer without copying; its bytes must stay until they are delivered."""
        link = self.attached.get(peer)
        if link is None:
            self.stats.drops += 1
            return False
        small = header.size <= SMALL_CHUNK
        socket = link.control if small else link.next_bulk()
        head = codec.encode_chunk(header)
        try:
            _first(socket, head, zmq.NOBLOCK | zmq.SNDMORE)
            socket.send(payload, zmq.NOBLOCK, copy=small)
        except zmq.Again:
            self.stats.drops += 1
            return False
        link.messages_out += 1
        link.bytes_out += header.size + len(head)
        if socket is link.control:
            self._dirty.add(self._fds[socket])
        return True

    def _send_control(self, link: Link, message: Message) -> None:
        frame = codec.encode(message)
        link.messages_out += 1
        link.bytes_out += len(frame)
        self._send(link.control, (frame,))

    def _send(self, socket: ZmqSocket, parts: tuple[bytes, ...]) -> None:
        try:
            _first(socket, parts[0], zmq.NOBLOCK | (zmq.SNDMORE if len(parts) > 1 else 0))
            for part in parts[1:]:
                socket.send(part, zmq.NOBLOCK)
        except zmq.Again:
            self.stats.drops += 1
        self._dirty.add(self._fds[socket])

    # ------------------------------------------------------------------- facts
    def snapshot(self) -> dict[str, object]:
        """What people see in peek: listeners, links and who is let in."""
        return {
            "bind": self.settings.bind,
            "port": self.outer.port, "pub_port": self.pub_port, "local_port": self.inner.port,
            "encrypted": self.settings.encrypted, "lanes": self.settings.lanes,
            "allowed_keys": len(self.gate.allowed), "denied_keys": self.gate.denied,
            "links": [
                {
                    "endpoint": link.endpoint, "encrypted": bool(link.key), "up": bool(link.up),
                    "peers": [peer for peer, other in self.attached.items() if other is link],
                    "messages_sent": link.messages_out, "bytes_sent": link.bytes_out,
                }
                for link in self.links.values()
            ],
        }  # fmt: skip

    def close(self, linger_ms: int = 0) -> None:
        """Close every socket; control messages already sent get ``linger_ms`` to leave."""
        for link in self.links.values():
            link.control.setsockopt(zmq.LINGER, linger_ms)
        self.context.destroy(linger=None)


def _first(socket: ZmqSocket, part: bytes, flags: int) -> None:
    try:
        socket.send(part, flags)
    except zmq.Again:
        socket.getsockopt(zmq.EVENTS)  # takes in a connection that was made since the last call
        socket.send(part, flags)


def _rest(socket: ZmqSocket) -> list[zmq.Frame]:
    """The frames that follow, at most one more than is allowed; the rest of a longer message is dropped."""
    parts: list[zmq.Frame] = []
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        if len(parts) <= limits.FRAMES:
            parts.append(frame)
    return parts


def _parse_route(route: bytes) -> tuple[str, str, bool]:
    """Peer, instance, and whether the name has the form ``peer:instance:lane`` at all."""
    try:
        peer, instance, _ = route.decode("ascii").split(":")
    except ValueError:
        return "", "", False
    return peer, instance, len(peer) == 16 and bool(instance)


def _bind(socket: ZmqSocket, address: str, port: int, setting: str) -> int:
    """Bind and return the port; ``ConfigError`` naming address and port where that fails."""
    if ":" in address:
        socket.setsockopt(zmq.IPV6, 1)
        where = f"tcp://[{address}]:{port or '*'}"
    else:
        where = f"tcp://{address}:{port or '*'}"
    try:
        socket.bind(where)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {address}:{port}: {error.strerror}; stop whoever uses it, or choose another "
            f"with the setting {setting!r} (0 picks a free port)"
        ) from None
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
