"""A peer for one machine in one thread: enough to test the client without the daemon.

Folds with numpy in rank order when all ranks have given everything. ``hold`` keeps results back,
``kill`` drops all connections.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from pathlib import Path

import numpy as np

from frogzmq.descriptor import Descriptor, decode_descriptor
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire import limits
from frogzmq.wire import ranks as w
from frogzmq.wire.messages import PROTOCOL, Identity, JoinGroup, Member

ARENA_BYTES = 1 << 30
FOLDS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
IDENTITY = Identity(peer="ab" * 8, instance="i", name="fake", endpoints=["tcp://192.0.2.1:5"])


def join_request(rank: int, size: int, gid: str = "0" * 32, timeout_s: float = 20.0) -> JoinGroup:
    """What a rank of a group on this one machine sends."""
    members = [Member(rank=r, pid=1000 + r, host="fake", who=IDENTITY) for r in range(size)]
    return JoinGroup(
        gid=gid, job="", name="test", rank=rank, size=size, timeout_s=timeout_s, options={}, members=members
    )  # fmt: skip


class _Op:
    def __init__(self, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.posts: dict[int, w.Post] = {}
        self.data: dict[int, np.ndarray | None] = {}
        self.ready: dict[int, int] = {}


class FakePeer:
    """Listens in ``folder``; use as a context manager."""

    def __init__(self, folder: Path, *, max_lease: int = ARENA_BYTES) -> None:
        self.folder, self.max_lease = folder, max_lease
        self.hold = False
        self.explanation = ""
        self.log: list[object] = []
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.bind(os.fspath(folder / "peer.sock"))
        self.sock.listen(64)
        self.path = folder / "arena.0"
        with open(self.path, "wb") as file:
            file.truncate(ARENA_BYTES)
        self.arena = np.memmap(self.path, np.uint8, "r+")
        self.top = 0
        self.leased = 0
        self.sizes: dict[int, int] = {}
        self.free: dict[int, list[int]] = {}
        self.conns: dict[socket.socket, w.Assembler] = {}
        self.groups: dict[str, dict[int, tuple[socket.socket, int]]] = {}
        self.joins: dict[tuple[socket.socket, int], w.Join] = {}
        self.ops: dict[tuple[str, int], _Op] = {}
        self.held: list[tuple[str, int]] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.sock, selectors.EVENT_READ)
        self.running = True
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakePeer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.path.unlink(missing_ok=True)

    def kill(self) -> None:
        self.running = False
        self.thread.join(5)
        for conn in (*self.conns, self.sock):
            conn.close()
        self.conns.clear()
        self.selector.close()
        (self.folder / "peer.sock").unlink(missing_ok=True)

    def said(self, kind: type) -> list:
        """Messages of one kind that arrived; waits a little for the first."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not any(type(m) is kind for m in self.log):
            time.sleep(0.01)
        time.sleep(0.05)
        return [message for message in self.log if type(message) is kind]

    def release(self) -> None:
        """Let go of what ``hold`` kept back."""
        self.hold = False
        for gid, seq in self.held:
            self._finish(gid, seq)
        self.held.clear()

    def fail(self, seq: int, code: str, text: str) -> None:
        """Fail every group from ``seq`` on."""
        for (conn, handle), _ in list(self.joins.items()):
            self._json(conn, w.Failed(handle=handle, seq=seq, code=code, text=text))

    def _run(self) -> None:
        while self.running:
            for key, _ in self.selector.select(0.05):
                if key.fileobj is self.sock:
                    conn, _ = self.sock.accept()
                    self.conns[conn] = w.Assembler(w.FROM_RANK)
                    self.selector.register(conn, selectors.EVENT_READ)
                else:
                    try:
                        self._read(key.fileobj)
                    except OSError:  # the client has closed its end
                        self._forget(key.fileobj)

    def _read(self, conn: socket.socket) -> None:
        data = conn.recv(limits.DATAGRAM_BYTES + 1)
        if not data:
            self._forget(conn)
            return
        message = self.conns[conn].feed(data)
        if message is not None:
            self.log.append(message)
            handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
            if handler is not None:
                handler(conn, message)

    def _forget(self, conn: socket.socket) -> None:
        self.selector.unregister(conn)
        del self.conns[conn]
        conn.close()

    def _json(self, conn: socket.socket, message: object) -> None:
        for piece in w.encode_json(message):
            conn.send(piece)

    def _on_hello(self, conn: socket.socket, message: w.Hello) -> None:
        arena = [os.fspath(self.path)]
        self._json(
            conn,
            w.Welcome(who=IDENTITY, pid=os.getpid(), arena=arena, protocol=PROTOCOL, ephemeral=False),
        )

    def _on_join(self, conn: socket.socket, message: w.Join) -> None:
        group = self.groups.setdefault(message.gid, {})
        group[message.rank] = (conn, message.handle)
        self.joins[conn, message.handle] = message
        self._json(conn, w.Note(handle=message.handle, text=f"rank {message.rank} is here"))
        if len(group) == message.size:
            for where, handle in group.values():
                self._json(where, w.Joined(handle=handle))

    def _on_leave(self, conn: socket.socket, message: w.Leave) -> None:
        self.joins.pop((conn, message.handle), None)

    def _on_peek(self, conn: socket.socket, message: w.Peek) -> None:
        self._json(conn, w.Peeked(snapshot={"groups": len(self.groups), "filler": "x" * 100_000}))

    def _on_explain(self, conn: socket.socket, message: w.Explain) -> None:
        if self.explanation:
            self._json(conn, w.Explained(handle=message.handle, seq=message.seq, text=self.explanation))

    def _on_lease(self, conn: socket.socket, message: w.Lease) -> None:
        pool = self.free.setdefault(message.size, [])
        if not pool and self.leased + message.size > self.max_lease:
            self._json(conn, w.Error(code="StoreFull", text="the arena is full", req=message.req))
            return
        if pool:
            off = pool.pop()
        else:
            off, self.top = self.top, self.top + message.size
        self.leased += message.size
        self.sizes[off] = message.size
        conn.send(w.encode_leased(message.req, 0, off, message.size))

    def _on_unlease(self, conn: socket.socket, message: w.Unlease) -> None:
        size = self.sizes[message.off]
        self.leased -= size
        self.free.setdefault(size, []).append(message.off)

    def _on_post(self, conn: socket.socket, message: w.Post) -> None:
        join = self.joins.get((conn, message.handle))
        if join is None:
            return
        op = self.ops.setdefault((join.gid, message.seq), _Op(decode_descriptor(message.descriptor)))
        op.posts[join.rank] = message
        op.ready[join.rank] = message.ready
        if message.flags & w.INLINE:
            op.data[join.rank] = np.frombuffer(bytes(message.payload), np.uint8)
        elif message.flags & w.NODATA:
            op.data[join.rank] = None
        else:
            op.data[join.rank] = self.arena[message.off : message.off + message.nbytes]
        self._settle(join, message.seq)

    def _on_ready(self, conn: socket.socket, message: w.Ready) -> None:
        join = self.joins[conn, message.handle]
        self.ops[join.gid, message.seq].ready[join.rank] = message.ready
        self._settle(join, message.seq)

    def _settle(self, join: w.Join, seq: int) -> None:
        op = self.ops[join.gid, seq]
        complete = len(op.posts) == join.size
        if not complete or any(op.ready[r] < post.nbytes for r, post in op.posts.items()):
            return
        if self.hold:
            self.held.append((join.gid, seq))
        else:
            self._finish(join.gid, seq)

    def _finish(self, gid: str, seq: int) -> None:
        op = self.ops.pop((gid, seq))
        result = _fold(op)
        off = -1
        for rank, (conn, handle) in sorted(self.groups[gid].items()):
            d = op.descriptor
            wanted = d.kind in (OpKind.ALL_REDUCE, OpKind.ALL_GATHER)
            wanted |= d.kind == OpKind.BROADCAST and rank != d.root
            wanted |= d.kind == OpKind.REDUCE and rank == d.root
            if not wanted:
                conn.send(w.encode_result(handle, seq, w.NODATA | w.FINAL, 0, 0, 0, 0))
            elif len(result) <= limits.INLINE_BYTES:
                size = len(result)
                conn.send(
                    w.encode_result(handle, seq, w.INLINE | w.FINAL, 0, 0, size, size, result.tobytes())
                )
            else:
                if off < 0:
                    off, self.top = self.top, self.top + len(result)
                    self.arena[off : off + len(result)] = result
                half = len(result) // 2
                conn.send(w.encode_result(handle, seq, 0, 0, off, half, len(result)))
                conn.send(w.encode_result(handle, seq, w.FINAL, 0, off, len(result), len(result)))
            if op.posts[rank].flags == 0:
                conn.send(w.encode_freed(handle, seq))


def _fold(op: _Op) -> np.ndarray:
    d = op.descriptor
    inputs = [op.data[rank] for rank in sorted(op.data)]
    if d.kind == OpKind.BARRIER:
        return np.empty(0, np.uint8)
    if d.kind == OpKind.BROADCAST:
        return op.data[d.root]
    if d.kind == OpKind.ALL_GATHER:
        return np.concatenate(inputs)
    typed = [data.view(d.dtype) for data in inputs]
    total = typed[0].copy()
    for more in typed[1:]:
        total = FOLDS[ReduceOp.SUM if d.reduce == ReduceOp.AVG else d.reduce](total, more)
    if d.reduce == ReduceOp.AVG:
        total /= len(typed)
    return total.astype(d.dtype).view(np.uint8)
