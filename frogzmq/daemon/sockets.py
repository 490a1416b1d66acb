"""The ZeroMQ sockets of a peer in its poll loop: which to read, how to send, how to bind.

Queues are bounded by high-water marks; what does not fit is dropped and counted (``stats.drops``), which
only happens to a peer that takes nothing off its links: repair and probing deal with it.
"""

from __future__ import annotations

import select
from collections.abc import Callable

import zmq

from frogzmq.daemon.link import ZmqContext, ZmqSocket
from frogzmq.errors import ConfigError
from frogzmq.machine import Stats
from frogzmq.wire import limits

BUDGET = 64
"""Messages taken from one socket before the others get their turn."""


class Sockets:
    """Sockets of one context, each with what reads it."""

    def __init__(self, stats: Stats, epoll: select.epoll) -> None:
        self.stats = stats
        self._epoll = epoll
        self._by_fd: dict[int, Callable[[], bool]] = {}
        self._fds: dict[ZmqSocket, int] = {}
        self._dirty: set[int] = set()
        self.context: ZmqContext = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, 16_384)

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

    def _send(self, socket: ZmqSocket, parts: tuple[bytes, ...]) -> None:
        try:
            first(socket, parts[0], zmq.NOBLOCK | (zmq.SNDMORE if len(parts) > 1 else 0))
            for part in parts[1:]:
                socket.send(part, zmq.NOBLOCK)
        except zmq.Again:
            self.stats.drops += 1
        self._dirty.add(self._fds[socket])


def first(socket: ZmqSocket, part: bytes, flags: int) -> None:
    """Send the first part of a message; ``zmq.Again`` when the queue is full."""
    try:
        socket.send(part, flags)
    except zmq.Again:
        socket.getsockopt(zmq.EVENTS)  # takes in a connection that was made since the last call
        socket.send(part, flags)


def rest(socket: ZmqSocket) -> list[zmq.Frame]:
    """The frames that follow, at most one more than is allowed; the rest of a longer message is dropped."""
    parts: list[zmq.Frame] = []
    more = True
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        if len(parts) <= limits.FRAMES:
            parts.append(frame)
    return parts


def bind(socket: ZmqSocket, address: str, port: int, setting: str) -> int:
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
