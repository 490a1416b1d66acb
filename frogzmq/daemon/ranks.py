"""The machine-local service: an AF_UNIX SOCK_SEQPACKET socket that ranks and commands connect to.

A connection that closes without a goodbye is a process that died: its ranks leave their groups at once,
and its leases are taken back when no op uses their bytes any more. Whoever sends garbage is told so,
counted and disconnected; nobody else notices.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from frogzmq.daemon.absent import Absent
from frogzmq.daemon.rankconn import Connection, Seat
from frogzmq.descriptor import Descriptor, decode_descriptor
from frogzmq.dtypes import dtype_of
from frogzmq.errors import ConfigError, FrogError, StoreFull, WireError
from frogzmq.fold.support import refusal
from frogzmq.machine import Event, RankConsumed, RankGot, RankJoined, RankLeft, RankPosted, RankReady, Stats
from frogzmq.store.arena import Arena
from frogzmq.store.index import Extent
from frogzmq.types import Digest, GroupId, OpKind
from frogzmq.wire import limits, ranks
from frogzmq.wire.messages import PROTOCOL, Identity

log = logging.getLogger("frogzmq.ranks")

_SEND_BUFFER = 1 << 20
MAX_CONNECTIONS = 1024


@dataclass(slots=True)
class Hooks:
    """What the service asks of its owner."""

    feed: Callable[[Event], None]
    put_input: Callable[..., None]
    explain: Callable[[GroupId, int], str]
    snapshot: Callable[[], dict[str, Any]]
    receipts: Callable[[str], dict[str, Any]]
    stop: Callable[[str], None]


_ALIKE = frozenset((OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BARRIER))
"""Kinds in which all ranks give the same number of bytes."""


def _given(descriptor: Descriptor, rank: int, world: int) -> int | None:
    """Bytes that the rank gives; None where the group cannot run the op (the core fails it, on all ranks)."""
    return None if descriptor.misfit(range(world)) else descriptor.gives(rank, world)


@lru_cache(maxsize=256)
def _known(encoded: bytes) -> Descriptor:
    """The descriptor, if its cell is supported; training repeats a handful of them."""
    descriptor = decode_descriptor(encoded)
    text = refusal(descriptor.kind, descriptor.reduce, dtype_of(descriptor.dtype))
    if text is not None:
        raise WireError(text)
    return descriptor


class RankService:
    """All connections of local processes. ``FrogError`` from the constructor: the socket cannot be made."""

    def __init__(
        self, path: Path, me: Identity, arena: Arena, stats: Stats, epoll: select.epoll, *, ephemeral: bool
    ) -> None:
        self.path, self.me, self.arena, self.stats, self.ephemeral = path, me, arena, stats, ephemeral
        self.hooks: Hooks
        self.conns: dict[int, Connection] = {}
        self._pids: dict[int, Connection] = {}
        self._absent = Absent()
        self.seats: dict[tuple[GroupId, int], Seat] = {}
        self.busy: dict[tuple[GroupId, int, int], tuple[Seat, Extent]] = {}
        """(group, op, rank) whose contribution stands in a lease, which is pinned for it."""
        self.ever = 0
        self._next = 0
        self._epoll = epoll
        path.unlink(missing_ok=True)  # left by a peer that was killed: the lock says that none lives
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(os.fspath(path))
            path.chmod(0o600)
            self.listener.listen(128)
        except OSError as error:
            self.listener.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from None
        self.listener.setblocking(False)
        self.fd = self.listener.fileno()
        epoll.register(self.fd, select.EPOLLIN)
        self._handlers: dict[type, Callable[[Connection, Any], None]] = {
            ranks.Post: self._post, ranks.Consumed: self._consumed, ranks.Got: self._got,
            ranks.Ready: self._ready,
            ranks.Lease: self._lease, ranks.Unlease: self._unlease, ranks.Explain: self._explain,
            ranks.Hello: self._hello, ranks.Join: self._join, ranks.Leave: self._leave,
            ranks.Bye: self._bye, ranks.Peek: self._peek, ranks.Stop: self._stop,
        }  # fmt: skip

    @property
    def living(self) -> int:
        """Connections of ranks (not of commands) that are open now."""
        return sum(conn.is_rank for conn in self.conns.values())

    # ------------------------------------------------------------------ connections
    def accept(self) -> None:
        """Take in whoever has connected."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:  # none left; or no descriptors, which the next call meets again
                return
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._next += 1
            conn = Connection(self._next, sock, self._epoll)
            if conn.uid not in (os.getuid(), 0) or len(self.conns) >= MAX_CONNECTIONS:
                self.stats.strangers += 1
                log.warning("refused process %d of user %d on %s", conn.pid, conn.uid, self.path)
                conn.close()
                continue
            self.conns[conn.fd] = conn
            self._pids[conn.pidfd] = conn

    def ready(self, fd: int, mask: int) -> bool:
        """Serve the connection on ``fd``; ``False`` if it is none of ours."""
        conn = self.conns.get(fd)
        if conn is None:
            return self._ended(fd)
        if mask & select.EPOLLOUT:
            conn.flush()
        if mask & ~select.EPOLLOUT:
            self._read(conn)
        return True

    def _ended(self, fd: int) -> bool:
        """A process has ended; what it said before counts. ``False`` if ``fd`` is none of ours."""
        conn = self._pids.get(fd)
        if conn is None:
            return False
        self._read(conn)
        if conn.open and not conn.pending():
            self._gone(conn)
        return True

    def _read(self, conn: Connection) -> None:
        # One datagram a turn: epoll says at once whether there is another, which is cheaper than to ask.
        datagram = conn.receive()
        if datagram is None:
            return
        if not datagram:
            self._gone(conn)
            return
        try:
            message = conn.decode(datagram)
            if message is None:
                return
            if not conn.greeted and type(message) is not ranks.Hello:
                raise WireError(f"{type(message).__name__} before Hello")
            self._handlers[type(message)](conn, message)
        except FrogError as error:
            self._reject(conn, error)

    def _reject(self, conn: Connection, error: FrogError) -> None:
        if isinstance(error, WireError):
            self.stats.rejected_frames += 1
        log.warning("disconnected process %d: %s", conn.pid, error)
        text = limits.clip(str(error), limits.EXPLAIN_CHARS)
        conn.send_json(ranks.Error(code=type(error).__name__, text=text, req=0))
        self._drop(conn, False, f"its peer disconnected it: {error}")

    def _gone(self, conn: Connection) -> None:
        where = f"process {conn.pid} on {self.me.name}"
        self._drop(conn, False, f"{where} ended without saying goodbye (killed or crashed)")

    def _drop(self, conn: Connection, clean: bool, reason: str) -> None:
        """Close a connection; its ranks leave; its leases go when nothing uses them."""
        if self.conns.pop(conn.fd, None) is None:
            return
        self._pids.pop(conn.pidfd, None)
        conn.close()
        for seat in list(conn.seats.values()):
            self._vacate(seat, clean, reason)
        self.arena.reclaim(conn.owner)
        pid = conn.said_pid
        if pid and not any(other.said_pid == pid for other in self.conns.values()):
            for gid, rank in self._absent.ended(pid, reason):
                self.hooks.feed(RankLeft(gid, rank, False, limits.clip(reason)))

    def _vacate(self, seat: Seat, clean: bool, reason: str) -> None:
        del seat.conn.seats[seat.handle]
        seat.conn.former.add(seat.handle)
        self.seats.pop((seat.gid, seat.rank), None)
        self.hooks.feed(RankLeft(seat.gid, seat.rank, clean, limits.clip(reason)))

    # --------------------------------------------------------------------- requests
    def _seat(self, conn: Connection, handle: int) -> Seat | None:
        """The seat, or None where the rank has just left: another of its threads had not heard of it."""
        seat = conn.seats.get(handle)
        if seat is None and handle not in conn.former:
            raise WireError(f"handle {handle} names no group on this connection")
        return seat

    def seat(self, conn: Connection, handle: int) -> Seat | None:
        """See ``_seat``, for requests that others serve (``requests``)."""
        return conn.seats.get(handle) or self._seat(conn, handle)

    def serve(self, requests: dict[type, Callable[[Connection, Any], None]]) -> None:
        """Hand these kinds of requests to somebody else."""
        self._handlers |= requests

    def _hello(self, conn: Connection, message: ranks.Hello) -> None:
        if conn.greeted:
            raise WireError("second Hello")
        conn.greeted = True
        conn.is_rank = bool(message.torch)
        self.ever += conn.is_rank
        conn.said_pid = message.pid
        self._absent.came(message.pid)
        conn.send_json(
            ranks.Welcome(
                protocol=PROTOCOL, who=self.me, pid=os.getpid(), arena=self.arena.paths,
                ephemeral=self.ephemeral,
            )
        )  # fmt: skip

    def _join(self, conn: Connection, message: ranks.Join) -> None:
        gid = GroupId(bytes.fromhex(message.gid))
        if message.handle in conn.seats or message.handle in conn.former or message.rank >= message.size:
            raise WireError(f"handle {message.handle} is in use, or rank {message.rank} is not in the group")
        if (gid, message.rank) in self.seats:
            other = self.seats[gid, message.rank].conn.pid
            text = f"rank {message.rank} of group {message.name!r} is already taken by process {other}"
            code = "DuplicateIdentity"
            conn.send_json(ranks.Failed(handle=message.handle, seq=0, code=code, text=text))
            return
        if not conn.is_rank:
            conn.is_rank = True
            self.ever += 1
        seat = Seat(conn, message.handle, gid, message.rank, message.size)
        conn.seats[message.handle] = self.seats[gid, message.rank] = seat
        group = message.group()
        self.hooks.feed(RankJoined(conn.id, group))
        self._absent.seated(gid, message.rank, conn.said_pid)
        local = ((m.rank, m.pid) for m in group.members if m.who.instance == self.me.instance)
        unseated = [(rank, pid) for rank, pid in local if (gid, rank) not in self.seats]
        for rank, reason in self._absent.awaits(gid, unseated):
            self.hooks.feed(RankLeft(gid, rank, False, limits.clip(reason)))

    def _lease(self, conn: Connection, message: ranks.Lease) -> None:
        try:
            extent = self.arena.lease(conn.owner, message.size)
        except StoreFull as error:
            conn.send_json(ranks.Error(code="StoreFull", text=str(error), req=message.req))
            return
        conn.leases[extent.seg, extent.off] = extent
        conn.send(ranks.encode_leased(message.req, extent.seg, extent.off, extent.size))

    def _unlease(self, conn: Connection, message: ranks.Unlease) -> None:
        extent = conn.leases.get((message.seg, message.off))
        if extent is None:
            raise WireError(f"no lease begins at {message.off} of segment {message.seg}")
        del conn.leases[message.seg, message.off]
        self.arena.release(extent)

    def _post(self, conn: Connection, post: ranks.Post) -> None:
        seat = conn.seats.get(post.handle) or self._seat(conn, post.handle)
        if seat is None:
            if not post.flags:
                conn.send(ranks.encode_freed(post.handle, post.seq))
            return
        descriptor = _known(post.descriptor)
        seq, nbytes = post.seq, post.nbytes
        self._check_post(seat, post, descriptor)
        seat.last = seq
        seat.in_flight += 1
        buf: Any
        if post.flags & ranks.NODATA:
            self.hooks.feed(RankPosted(seat.gid, seat.rank, seq, descriptor, 0))
            return
        if post.flags & ranks.INLINE:
            # Folding may use the lowest rank's region as its output: a datagram's bytes are read-only.
            buf = np.frombuffer(bytearray(post.payload), np.uint8)
        else:
            buf = self.arena.view(post.seg, post.off, nbytes, conn.owner)
            # Pinned: what was handed over outlives the rank that gave it.
            self.busy[seat.gid, seq, seat.rank] = (seat, self.arena.pin(post.seg, post.off))
            if post.ready < nbytes:
                seat.partial[seq] = nbytes
        self.hooks.put_input(seat.gid, seq, seat.rank, buf, leased=not post.flags & ranks.INLINE)
        self.hooks.feed(RankPosted(seat.gid, seat.rank, seq, descriptor, post.ready))

    def _check_post(self, seat: Seat, post: ranks.Post, descriptor: Descriptor) -> None:
        if not seat.joined:
            raise WireError(f"op {post.seq} posted before the group was complete")
        if post.seq != seat.last + 1:
            raise WireError(f"op {post.seq} posted after op {seat.last}: ops are numbered one by one")
        if seat.in_flight >= 2 * limits.WINDOW:
            raise WireError(f"more than {2 * limits.WINDOW} ops in flight in one group")
        size = post.nbytes
        given = descriptor.nbytes if descriptor.kind in _ALIKE else _given(descriptor, seat.rank, seat.size)
        if post.flags & ranks.NODATA:
            if given and given > 0:
                raise WireError(f"{descriptor.describe()} posted without data by rank {seat.rank}")
        elif not post.flags & ranks.INLINE and limits.goes_inline(size, len(post.descriptor)):
            raise WireError(f"{size} bytes posted in the arena: up to {limits.INLINE_BYTES} go inline")
        elif given is not None and size != given:
            raise WireError(f"{descriptor.describe()} has {given} bytes of rank {seat.rank}, posted {size}")

    def _ready(self, conn: Connection, message: ranks.Ready) -> None:
        seat = self._seat(conn, message.handle)
        if seat is None:
            return
        nbytes = seat.partial.get(message.seq)
        if nbytes is None or message.ready > nbytes:
            raise WireError(f"{message.ready} bytes ready of op {message.seq}, which waits for none or fewer")
        if message.ready == nbytes:
            del seat.partial[message.seq]
        self.hooks.feed(RankReady(seat.gid, seat.rank, message.seq, message.ready))

    def _consumed(self, conn: Connection, message: ranks.Consumed) -> None:
        seat = self._seat(conn, message.handle)
        if seat is not None:
            self.hooks.feed(RankConsumed(seat.gid, seat.rank, message.seq))

    def _got(self, conn: Connection, message: ranks.Got) -> None:
        seat = self._seat(conn, message.handle)
        if seat is not None:
            self.hooks.feed(RankGot(seat.gid, seat.rank, message.seq, Digest(message.root)))

    def _leave(self, conn: Connection, message: ranks.Leave) -> None:
        seat = self._seat(conn, message.handle)
        if seat is not None:
            self._vacate(seat, message.clean, message.reason)

    def _explain(self, conn: Connection, message: ranks.Explain) -> None:
        seat = self._seat(conn, message.handle)
        text = self.hooks.explain(seat.gid, message.seq) if seat is not None else "this rank has left"
        text = limits.clip(text, limits.EXPLAIN_CHARS)
        conn.send_json(ranks.Explained(handle=message.handle, seq=message.seq, text=text))

    def _bye(self, conn: Connection, message: ranks.Bye) -> None:
        self._drop(conn, message.clean, message.reason)

    def _peek(self, conn: Connection, message: ranks.Peek) -> None:
        snapshot = self.hooks.receipts(message.gid) if message.receipts else self.hooks.snapshot()
        conn.send_json(ranks.Peeked(snapshot=snapshot))

    def _stop(self, conn: Connection, message: ranks.Stop) -> None:
        self.hooks.stop(f"process {conn.pid} asked for it")

    # ---------------------------------------------------------------------- answers
    def send(self, seat: Seat, datagram: bytes) -> None:
        """Send to the process that has ``seat``."""
        if not seat.conn.send(datagram):
            self._stuck(seat.conn)

    def send_json(self, seat: Seat, message: ranks.Json) -> None:
        """Send a JSON message to the process that has ``seat``."""
        if not seat.conn.send_json(message):
            self._stuck(seat.conn)

    def _stuck(self, conn: Connection) -> None:
        # Shut down rather than dropped: its end of file is handled by the loop, not in mid-effect.
        self.stats.drops += 1
        if conn.open:
            log.warning("process %d does not read what it is sent: disconnected", conn.pid)
            conn.shut()

    def freed(self, gid: GroupId, seq: int, rank: int) -> None:
        """An op does not use a rank's lease any more: tell the rank, or let a dead one's bytes go."""
        entry = self.busy.pop((gid, seq, rank), None)
        if entry is not None:
            seat, extent = entry
            self.arena.unpin(extent)
            if seat.conn.open:
                self.send(seat, ranks.encode_freed(seat.handle, seq))

    def fail_all(self, text: str) -> None:
        """The peer stops: every op of every local rank fails with ``PeerUnreachable``."""
        for seat in list(self.seats.values()):
            seat.conn.send_json(ranks.Failed(handle=seat.handle, seq=0, code="PeerUnreachable", text=text))

    def close(self) -> None:
        """Close all connections and remove the socket's file."""
        for conn in list(self.conns.values()):
            conn.flush()
            conn.close()
        self.conns.clear()
        self.listener.close()
        self.path.unlink(missing_ok=True)

    def snapshot(self) -> list[dict[str, Any]]:
        """Local processes, for peek."""
        return [
            {
                "pid": conn.pid, "rank": conn.is_rank, "groups": len(conn.seats),
                "leases": len(conn.leases), "leased_bytes": sum(e.size for e in conn.leases.values()),
            }
            for conn in self.conns.values()
        ]  # fmt: skip
