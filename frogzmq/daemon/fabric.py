"""The network side of a peer: all ZeroMQ sockets, owned by the loop's thread.

Messages to a peer leave by the DEALER that we dialled to it, chunks by its bulk lanes; announcements leave
by one PUB and come in by one SUB per peer, so that the sender of each is known. See ``listening`` for who
calls us, ``sockets`` for the poll loop's side, ``link`` for one connection of ours.
"""

from __future__ import annotations

import select
from typing import Any

import zmq

from frogzmq.daemon.link import CONTROL_HWM, Caller, Link, ZmqSocket, bounded, encrypt_client
from frogzmq.daemon.listening import FabricSettings, Listening
from frogzmq.daemon.sockets import BUDGET, first, rest
from frogzmq.machine import LinkDown, LinkReceived, LinkUp, Received, Stats
from frogzmq.types import PeerId
from frogzmq.wire import frames as codec
from frogzmq.wire.messages import ChunkHeader, Hello, Message, Refuse, Welcome

SMALL_CHUNK = 32 << 10
"""Chunks up to this size use the control lane, so that they overtake bulk."""
_CONTROL_KINDS = (Hello.KIND, Welcome.KIND, Refuse.KIND)


class Fabric(Listening):
    """Our links to other peers, and everything that travels by them."""

    def __init__(self, caller: Caller, settings: FabricSettings, stats: Stats, epoll: select.epoll) -> None:
        super().__init__(caller, settings, stats, epoll)
        self.links: dict[str, Link] = {}
        self.attached: dict[str, Link] = {}
        self._subs: dict[str, tuple[str, ZmqSocket]] = {}

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

    # ---------------------------------------------------------------- receiving
    def _drain_link(self, link: Link) -> bool:
        for _ in range(BUDGET):
            if link.control.closed:  # what the last message said made the core hang up
                return False
            try:
                frame = link.control.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            extra = rest(link.control) if frame.more else []
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
        for _ in range(BUDGET):
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
            first(socket, head, zmq.NOBLOCK | zmq.SNDMORE)
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

    # -------------------------------------------------------------------- facts
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
