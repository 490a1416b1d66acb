"""One connection from a local process: its datagrams in, a bounded outbox out, what it holds here."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from frogzmq.store.index import Extent
from frogzmq.types import ConnId, GroupId
from frogzmq.wire import limits, ranks
from frogzmq.wire.ranks import Assembler, Datagram, Json

_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Worked out once: combining two enum members costs as much as a quarter of the call."""
MAX_OUTBOX_BYTES = 32 << 20
"""A process that lets this much pile up does not read: it is disconnected."""
SEAT_BYTES = 2 * limits.WINDOW * (limits.INLINE_BYTES + 64)
"""What a rank may have coming in each of its groups while it computes and reads nothing."""
_CREDENTIALS = struct.Struct("iII")


def _watch(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # another pid namespace, or an old kernel: the socket's end must do
        return -1


@dataclass(slots=True, eq=False)
class Seat:
    """A rank's place in a group, as its connection names it by ``handle``."""

    conn: Connection
    handle: int
    gid: GroupId
    rank: int
    size: int
    """Ranks in the group."""
    last: int = 0
    """Number of the last op that it called."""
    joined: bool = False
    in_flight: int = 0
    partial: dict[int, int] = field(default_factory=dict)
    """Ops of which only a prefix has been written, with their size."""


class Connection:
    """``pid`` and ``uid`` are what the kernel says of the process at the other end."""

    def __init__(self, number: int, sock: socket.socket, epoll: select.epoll) -> None:
        self.id = ConnId(number)
        self.sock, self.fd, self._epoll = sock, sock.fileno(), epoll
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(raw)
        self.owner = f"connection {number} of process {self.pid}"
        self.greeted = self.is_rank = self.open = False
        self.said_pid = 0
        """How the process calls itself (in its own pid namespace, if it has one)."""
        self.seats: dict[int, Seat] = {}
        self.leases: dict[tuple[int, int], Extent] = {}
        self.former: set[int] = set()
        """Handles of groups that were left: what is still said about them is ignored."""
        self._assembler = Assembler(ranks.FROM_RANK)
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._writing = False
        sock.setblocking(False)
        epoll.register(self.fd, select.EPOLLIN)
        # The process itself is watched too: a child that it forked holds the socket open after its death.
        self.pidfd = _watch(self.pid)
        if self.pidfd >= 0:
            epoll.register(self.pidfd, select.EPOLLIN)
        self.open = True

    # ------------------------------------------------------------------ reading
    def receive(self) -> bytes | None:
        """The next datagram; None if there is none now, empty if the other end is gone."""
        for _ in range(2):
            try:
                return self.sock.recv(limits.DATAGRAM_BYTES + 1)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other end closed before it had read everything. Told once, ahead of what it had
                # sent until then, which may be a goodbye.
                continue
            except OSError:
                break
        return b""

    def pending(self) -> bool:
        """Whether something has arrived that was not read yet."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return bool(poller.poll(0))

    def decode(self, datagram: bytes) -> Datagram | None:
        """The message that the datagram is or completes; ``WireError`` if it is garbage."""
        return self._assembler.feed(datagram)

    # ------------------------------------------------------------------ sending
    def send(self, datagram: bytes) -> bool:
        """Send now, or queue where the other end is slow; ``False``: it is gone or does not read at all."""
        if not self.open:
            return False
        if not self._outbox:
            try:
                self.sock.send(datagram, _SEND)
                return True
            except BlockingIOError:
                pass
            except OSError:
                return False  # its end of file arrives by the other direction
        if self._outbox_bytes + len(datagram) > MAX_OUTBOX_BYTES + len(self.seats) * SEAT_BYTES:
            return False
        self._outbox.append(datagram)
        self._outbox_bytes += len(datagram)
        if not self._writing:
            self._writing = True
            self._epoll.modify(self.fd, select.EPOLLIN | select.EPOLLOUT)
        return True

    def send_json(self, message: Json) -> bool:
        """Send a JSON message in as many datagrams as it takes."""
        return all([self.send(datagram) for datagram in ranks.encode_json(message)])

    @property
    def waiting(self) -> bool:
        """Whether something is queued."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it."""
        outbox = self._outbox
        while outbox:
            try:
                self.sock.send(outbox[0], _SEND)
            except BlockingIOError:
                return
            except OSError:
                outbox.clear()
                break
            self._outbox_bytes -= len(outbox.popleft())
        self._outbox_bytes = 0
        if self._writing:
            self._writing = False
            self._epoll.modify(self.fd, select.EPOLLIN)

    # ------------------------------------------------------------------- ending
    def shut(self) -> None:
        """Make the socket report its end: the loop then closes it outside of whatever is going on now."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; leases are the service's business."""
        if self.open:
            self.open = False
            self._epoll.unregister(self.fd)
            if self.pidfd >= 0:
                self._epoll.unregister(self.pidfd)
                os.close(self.pidfd)
            # Closing over unread datagrams would reset the other end, which then never reads our last words.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RD)
                while self.sock.recv(1):
                    pass
            self.sock.close()
            self._outbox.clear()
