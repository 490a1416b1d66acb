"""A rank's place in one process group: posts ops, takes results, keeps at most ``WINDOW`` in flight.

Threads: ``post`` may be called from any thread and never waits for the peer. What cannot start yet (window
full, no block of the arena, a fence) stays in a queue as references to the caller's memory. Whoever
notices that something became possible starts it: one thread at a time holds ``_starting``, and everyone
else leaves it to that thread, so a receiving thread never waits for one that copies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frogzmq.client.letters import again
from frogzmq.client.mail import Mailbox
from frogzmq.client.ops import Bytes, Op
from frogzmq.descriptor import Descriptor
from frogzmq.errors import FrogError, GroupBroken, WireError
from frogzmq.types import OpKind
from frogzmq.wire import limits
from frogzmq.wire.messages import JoinGroup
from frogzmq.wire.ranks import (
    FINAL,
    INLINE,
    NODATA,
    Result,
    encode_consumed,
    encode_explain,
    encode_got,
    encode_post,
    encode_ready,
)  # fmt: skip

if TYPE_CHECKING:
    from frogzmq.client.client import Client
    from frogzmq.client.leases import Block

logger = logging.getLogger("frogzmq")

SEGMENT_BYTES = 2 << 20
"""Copied between two READY messages: long against a message (20 us), short against a 64 MiB tensor."""
EXPLAIN_S = 1.0
"""How long an op that has run out of time waits for the peer to say who is missing."""
DRAIN_S = 60.0
"""Most that leaving waits for queued ops to be handed to the peer."""
_GRACE_S = EXPLAIN_S + 2.0


class GroupHandle:
    """One group on one connection, from ``Client.join``."""

    def __init__(self, client: Client, handle: int, join: JoinGroup) -> None:
        self.client = client
        self.handle = handle
        self.name = join.name
        self.rank = join.rank
        self.size = join.size
        self.timeout_s = join.timeout_s
        self.gid = join.gid
        self.witness = join.options.witness
        self.verify = join.options.verify
        self.seq = 0
        """Number of the latest op; the first is 1."""
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._queue: deque[Op] = deque()
        self._open: dict[int, Op] = {}
        self._queue_wanted = False
        self._broken: FrogError | None = None
        self._broken_from = 0
        self._asked: dict[int, float] = {}
        self.left = False
        self._members = {member.rank: member for member in join.members}
        self.mail = Mailbox(self)

    # ------------------------------------------------------------------- calling
    def post(
        self,
        descriptor: Descriptor,
        src: Bytes | None = None,
        sinks: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        fence: bool = False,
    ) -> Op:
        """Call the group's next collective; see ``Op`` for the arguments.

        Raise the group's error where it cannot go on. Until ``Op.done`` the memory behind ``sinks`` (and
        behind ``src``, while queued) belongs to the op.
        """
        self.client.check_usable()
        if descriptor.splits and len(descriptor.encoded) > limits.DESCRIPTOR_BYTES:
            raise WireError(
                f"{descriptor.kind.name.lower()} with {len(descriptor.splits)} splits takes "
                f"{len(descriptor.encoded)} bytes to describe, limit {limits.DESCRIPTOR_BYTES}; use smaller "
                "groups, or equal splits"
            )
        op = Op(self, descriptor, src, sinks, self.timeout_s if timeout_s is None else timeout_s)
        op.finish = finish
        op.fence = fence
        # Usually nothing is queued and nobody else is posting: then the op starts without the detour.
        direct = not self._queue and self._starting.acquire(blocking=False)
        try:
            with self._lock:
                if self._broken is not None and self.seq + 1 >= self._broken_from:
                    raise again(self._broken)
                self.seq = op.seq = self.seq + 1
                self._queue.append(op)
            if direct and self._can_start():
                self._start(self._queue[0])
        finally:
            if direct:
                self._starting.release()
        if self._queue or self._queue_wanted:
            self.start_queued()
        return op

    def wait(self, op: Op, timeout_s: float | None) -> None:
        """See ``Op.wait``."""
        client = self.client
        client.check_usable()
        if timeout_s is None:
            # Running out of time is noticed by whoever receives (``tick``), which also asks who is missing.
            while not op.done:
                client.connection.wait_for(op, max(op.deadline, time.monotonic()) + _GRACE_S)
                lost = client.connection.lost
                if lost is not None and not op.done:
                    raise again(lost)
            return
        if client.connection.wait_for(op, time.monotonic() + timeout_s):
            return
        explanation = client.explain(self, op.seq) if op.seq in self._open else ""
        if not op.done:
            raise op.late(timeout_s, explanation)

    def pump(self) -> None:
        """Take in what has arrived."""
        self.client.check_usable()
        self.client.connection.pump()

    def watch(self, op: Op, watcher: Callable[[Op], None]) -> bool:
        """Have ``watcher(op)`` called when it is done; False where it is done already."""
        self.client.check_usable()
        with self._lock:
            if op.done:
                return False
            if op.watchers is None:
                op.watchers = []
            op.watchers.append(watcher)
        self.client.connection.add_demand()
        return True

    @property
    def done(self) -> bool:
        """Whether every op and message has been handed to the peer (a group can be waited for until then)."""
        return not self._queue and self.mail.handed_over

    def rank_text(self, rank: int) -> str:
        """A rank, its process and its machine, for people."""
        member = self._members.get(rank)
        return f"rank {rank}" + (f" (process {member.pid} on {member.host})" if member is not None else "")

    @property
    def in_flight(self) -> int:
        """Ops that the peer has and that are not done."""
        return len(self._open)

    # ------------------------------------------------------------------ starting
    def start_queued(self) -> None:
        """Start what can start, unless another thread is at it (which then looks again)."""
        while self._can_start() and self._starting.acquire(blocking=False):
            stuck = False
            try:
                while not stuck and self._can_start():
                    stuck = not self._start(self._queue[0])
            finally:
                self._starting.release()
            if stuck:
                break
        if bool(self._queue) != self._queue_wanted:
            self._settle_demand()

    def _can_start(self) -> bool:
        try:
            op = self._queue[0]
        except IndexError:
            return False
        return len(self._open) < limits.WINDOW and not (op.fence and self._open)

    def _settle_demand(self) -> None:
        with self._lock:
            wanted = bool(self._queue)
            changed, self._queue_wanted = wanted != self._queue_wanted, wanted
        if changed and wanted:
            self.client.connection.add_demand()
        elif changed:
            self.client.connection.drop_demand()

    def _start(self, op: Op) -> bool:
        """Hand the head of the queue to the peer; False where it needs a block that is not there yet."""
        block: Block | None = None
        try:
            if op.src is not None and not limits.goes_inline(len(op.src), len(op.descriptor.encoded)):
                block = self.client.leases.take(len(op.src))
                if block is None:
                    return False
            with self._lock:
                # The op may have failed, and left the queue, in the meantime.
                current = bool(self._queue) and self._queue[0] is op
                if current:
                    self._queue.popleft()
                    self._open[op.seq] = op
            if not current:
                if block is not None:
                    self.client.leases.give_back(block)
                return True
            self._send(op, block)
        except FrogError as error:
            # The others must not wait for an op that this rank cannot give.
            self.leave(False, f"{type(error).__name__}: {error}", error)
        return True

    def _send(self, op: Op, block: Block | None) -> None:
        send, src, encoded = self.client.connection.send, op.src, op.descriptor.encoded
        op.src = None
        if src is None:
            send(encode_post(self.handle, op.seq, NODATA, 0, 0, 0, 0, encoded))
        elif block is None:
            size = len(src)
            send(encode_post(self.handle, op.seq, INLINE, 0, 0, size, size, encoded, src.tobytes()))
        else:
            self._send_block(op, src, block)

    def _send_block(self, op: Op, src: Bytes, block: Block) -> None:
        """Copy into the arena, segment by segment, so that the peer folds while the rest is copied."""
        send, size = self.client.connection.send, len(src)
        view = self.client.arena.view(block.seg, block.off, size)
        self.client.hold(self.handle, op.seq, block)
        try:
            for start in range(0, size, SEGMENT_BYTES):
                stop = min(start + SEGMENT_BYTES, size)
                np.copyto(view[start:stop], src[start:stop])
                if start == 0:
                    encoded = op.descriptor.encoded
                    send(encode_post(self.handle, op.seq, 0, block.seg, block.off, size, stop, encoded))
                elif op.done:
                    return
                else:
                    send(encode_ready(self.handle, op.seq, stop))
        finally:
            self.client.written(self.handle, op.seq)

    # ----------------------------------------------------- finishing (leader's thread)
    def on_result(self, message: Result) -> None:
        """Copy out what is ready; complete the op when that was all."""
        op = self._open.get(message.seq)
        if op is None:
            return
        flags, before = message.flags, op.taken
        if not flags & NODATA:
            sinks = op.sinks
            room = len(sinks[0]) if len(sinks) == 1 else sum(map(len, sinks))
            if room != message.total:
                text = f"result of {message.total} bytes for {op.describe()}, expected {room}"
                self._complete(op, WireError(text))
                return
            if flags & INLINE:
                op.put(np.frombuffer(message.payload, np.uint8))
            else:
                view = self.client.arena.view(message.seg, message.off, message.total)
                op.put(view[op.taken : message.ready])
        if self.witness:
            self._witnessed(op, flags, before)
        elif flags & FINAL:
            if not flags & (INLINE | NODATA):
                self.client.connection.send(encode_consumed(self.handle, op.seq))
            self._complete(op, None)

    def _witnessed(self, op: Op, flags: int, before: int) -> None:
        """Hash what has come since byte ``before``; at the end say so, and complete what need not wait."""
        if not flags & NODATA:
            tally = op.hash_since(before)
            if flags & FINAL:
                self.client.connection.send(encode_got(self.handle, op.seq, tally.root()))
        if flags & FINAL and (not self.verify or op.descriptor.kind == OpKind.BARRIER):
            self._complete(op, None)

    def on_verified(self, seq: int) -> None:
        """All machines and ranks agree on an op: its result can be trusted."""
        op = self._open.get(seq)
        if op is not None:
            self._complete(op, None)

    def _complete(self, op: Op, error: FrogError | None) -> None:
        finish = op.finish
        if error is None and finish is not None:
            try:
                finish()
            except Exception as problem:
                logger.exception("copying out the result of %s failed", op.describe())
                error = FrogError(f"copying out the result of {op.describe()} failed: {problem}")
        with self._lock:
            self._open.pop(op.seq, None)
            if op.done:
                return
            op.error = error
            op.done = True
            watchers, op.watchers = op.watchers, None
        op.sinks, op.src, op.finish = (), None, None
        if watchers is not None:
            for watcher in watchers:
                watcher(op)
                self.client.connection.drop_demand()
        if self._queue:
            self.start_queued()

    # -------------------------------------------------------------------- failing
    def fail(self, seq: int, error: FrogError) -> None:
        """Every op from ``seq`` on fails with ``error``; earlier ones go on."""
        with self._lock:
            if self._broken is None or seq < self._broken_from:
                self._broken, self._broken_from = error, seq
            queued = [op for op in self._queue if op.seq >= seq]
            for op in queued:
                self._queue.remove(op)
            failed = [op for number, op in self._open.items() if number >= seq] + queued
        for op in failed:
            self._complete(op, again(error))
        self.mail.fail(error)
        if self._queue_wanted:
            self._settle_demand()

    def tick(self, now: float) -> None:
        """Notice ops that have run out of time, ask the peer about them, and break the group."""
        self.mail.tick(now)
        with self._lock:
            late = [op for op in (*self._open.values(), *self._queue) if now >= op.deadline]
        for op in late:
            asked = self._asked.get(op.seq)
            if asked is None and op.seq in self._open:
                self._asked[op.seq] = now
                try:
                    self.client.connection.send(encode_explain(self.handle, op.seq))
                except FrogError:
                    return
            elif asked is None or now - asked >= EXPLAIN_S:
                self._expire(op, "")

    def on_explained(self, seq: int, text: str) -> None:
        """The peer said what an op that has run out of time waits for."""
        op = self._open.get(seq)
        if seq in self._asked and op is not None:
            self._expire(op, text)

    def _expire(self, op: Op, explanation: str) -> None:
        self._asked.clear()
        if not explanation and op.seq not in self._open:
            explanation = f"{len(self._open)} earlier ops of the group are not done"
        error = op.late(op.timeout_s, explanation)
        self.leave(False, f"{type(error).__name__}: {error}", error)

    # -------------------------------------------------------------------- leaving
    def leave(self, clean: bool, reason: str, error: FrogError | None = None) -> None:
        """Tell the peer that this rank takes no further part; open ops fail here with ``error``."""
        with self._lock:
            if self.left:
                return
            self.left = True
        why = error or GroupBroken(f"group {self.name!r} is closed on rank {self.rank}: {reason}")
        self.client.leave(self, clean, reason)
        self.fail(0, why)

    def close(self, reason: str = "destroyed") -> None:
        """Leave cleanly, after queued ops have been handed to the peer (at most ``DRAIN_S``)."""
        self.client.check_usable()
        if not self.left and not self.done and not self.client.departed:
            patience = time.monotonic() + min(DRAIN_S, self.timeout_s)
            self.client.connection.wait_for(self, patience)
        self.leave(True, reason)

    def error(self) -> FrogError | None:
        """Why the group cannot go on, or None."""
        return self._broken
