"""Messages of a rank to and from single ranks of a group.

Threads: ``send`` and ``receive`` may be called from any thread and never wait for the peer. The order of
calls is the order of messages: each is announced at once. The bytes of a message go with the announcement
(small ones), or follow as soon as there is a block of the arena; where a lot lies unread already, only when
the receiver waits for them. A send is done when its bytes have been copied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frogzmq.client.letters import ANY_RANK, Letter, Receiving, Sending, again
from frogzmq.client.ops import Bytes
from frogzmq.errors import FrogError, GroupBroken, StoreFull, WireError, from_code
from frogzmq.wire import limits
from frogzmq.wire.mail import mail_seq
from frogzmq.wire.ranks import (
    ANY,
    FINAL,
    INLINE,
    Arrived,
    MailAsked,
    MailDone,
    MailFailed,
    encode_explain,
    encode_mail,
    encode_mail_bytes,
    encode_mail_read,
    encode_mail_taken,
    encode_receive,
)  # fmt: skip

if TYPE_CHECKING:
    from frogzmq.client.group import GroupHandle
    from frogzmq.client.leases import Block

logger = logging.getLogger("frogzmq")

UNASKED_BYTES = 256 << 20
"""Bytes of large messages that may lie in the arena before anyone has asked for them, for each group."""
UNASKED = limits.MAIL_UNREAD
"""The same in messages, for large and for small ones."""
SAY_READ = limits.MAIL_UNREAD // 4
SEGMENT_BYTES = 2 << 20
"""Copied between two MailBytes messages."""
EXPLAIN_S = 1.0
"""How long a message that has run out of time waits for the peer to say what it knows."""


class Mailbox:
    """The messages of one ``GroupHandle``."""

    def __init__(self, group: GroupHandle) -> None:
        self.group, self.handle = group, group.handle
        self._client = group.client
        self._order = threading.Lock()
        """Held while a message gets its number and is announced."""
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._receive_number = 0
        self._receiving: dict[int, Receiving] = {}
        self._announced: dict[tuple[int, int], Sending] = {}
        """Messages whose bytes have not been given, in the order of their calls."""
        self._writing: dict[tuple[int, int], Sending] = {}
        self._asked: list[Sending] = []
        self._inline_sent = self._inline_over = 0
        self._read = self._read_told = 0
        self._full = False
        """The arena has refused a block: nothing is given unasked until one comes free."""
        self._demand = False
        self._waiting: dict[Letter, bool] = {}
        """Messages that somebody wants to be told of: their time runs."""

    # ------------------------------------------------------------------- calling
    def send(self, dst: int, tag: int, dtype: str, data: Bytes, timeout_s: float | None = None) -> Sending:
        """Send ``data`` to rank ``dst``. Its memory belongs to the message until that is done.

        Raise the group's error where it cannot go on.
        """
        size = len(data)
        message = Sending(self, dst, tag, dtype, size, timeout_s)
        inline = False
        with self._order:
            self._check()
            with self._lock:
                if len(self._announced) >= limits.MAIL_WINDOW // 2:
                    raise FrogError(f"{len(self._announced)} messages wait to be received; no more are taken")
                n = message.n = self._numbers[dst] = self._numbers.get(dst, 0) + 1
                if size <= limits.INLINE_BYTES and self._inline_sent - self._inline_over < UNASKED:
                    inline = True
                    self._inline_sent += 1
                else:
                    message.data = data
                    self._announced[dst, n] = message
            payload = data.tobytes() if inline else b""
            flags = INLINE if inline else 0
            self._client.connection.send(encode_mail(self.handle, n, flags, dst, tag, size, dtype, payload))
        if inline:
            message.done = True  # nobody else knows of it yet
        else:
            message.told = True
            self.start()
        return message

    def receive(
        self,
        src: int,
        tag: int,
        dtype: str,
        sinks: Sequence[Bytes],
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Receiving:
        """Receive the next message with ``tag`` from rank ``src`` (``ANY_RANK``: whomever) into ``sinks``.

        ``finish`` runs once when its bytes stand there. Raise the group's error where it cannot go on.
        """
        size = sum(map(len, sinks))
        message = Receiving(self, src, tag, dtype, size, timeout_s)
        message.sinks, message.finish = sinks, finish
        with self._order:
            self._check()
            with self._lock:
                if len(self._receiving) >= limits.MAIL_WINDOW // 2:
                    raise FrogError(f"{len(self._receiving)} receives wait for messages; no more are taken")
                n = message.n = self._receive_number = self._receive_number + 1
                self._receiving[n] = message
            source = ANY if src == ANY_RANK else src
            self._client.connection.send(encode_receive(self.handle, n, source, tag, size, dtype))
        return message

    def _check(self) -> None:
        self._client.check_usable()
        error = self.group.error()
        if error is not None:
            raise again(error)
        if self.group.left:
            raise GroupBroken(f"group {self.group.name!r} is closed on rank {self.group.rank}")

    # ------------------------------------------------------------------- waiting
    def wait(self, message: Letter, timeout_s: float | None) -> None:
        """See ``Letter.wait``."""
        client = self._client
        client.check_usable()
        seconds = message.timeout_s if timeout_s is None else timeout_s
        if client.connection.wait_for(message, time.monotonic() + seconds):
            return
        lost = client.connection.lost
        if lost is not None:
            raise again(lost)
        error = message.late(seconds, self._explained(message))
        if message.done:
            return
        if timeout_s is None:  # its own time: the group cannot go on, as with collectives
            self.group.leave(False, f"{type(error).__name__}: {error}", error)
        raise error

    def _explained(self, message: Letter) -> str:
        if isinstance(message, Sending):
            return ""
        seq = mail_seq(self.group.rank, message.n)
        return self._client.explain(self.group, seq, EXPLAIN_S)

    def pump(self) -> None:
        """Take in what has arrived."""
        self._client.check_usable()
        self._client.connection.pump()

    def watch(self, message: Letter, watcher: Callable[[Letter], None]) -> bool:
        """Have ``watcher(message)`` called when it is done; False where it is done already."""
        self._client.check_usable()
        with self._lock:
            if message.done:
                return False
            message.watchers.append(watcher)
            self._waiting[message] = False
            message.deadline = min(message.deadline, time.monotonic() + message.timeout_s)
        self._client.connection.add_demand()
        return True

    def tick(self, now: float) -> None:
        """Notice watched messages that have run out of time."""
        with self._lock:
            late = [message for message in self._waiting if now >= message.deadline]
        for message in late:
            if self._waiting.get(message) or isinstance(message, Sending):
                self._expire(message, "")
            else:
                self._waiting[message] = True
                message.deadline = now + EXPLAIN_S
                try:
                    seq = mail_seq(self.group.rank, message.n)
                    self._client.connection.send(encode_explain(self.handle, seq))
                except FrogError:
                    return

    def on_explained(self, seq: int, text: str) -> None:
        """The peer said what a message that has run out of time waits for."""
        for message in list(self._waiting):
            if self._waiting.get(message) and mail_seq(self.group.rank, message.n) == seq:
                self._expire(message, text)

    def _expire(self, message: Letter, explanation: str) -> None:
        error = message.late(message.timeout_s, explanation)
        self.group.leave(False, f"{type(error).__name__}: {error}", error)

    # -------------------------------------------------------------------- giving
    def start(self) -> None:
        """Give what can be given, unless another thread is at it (which then looks again)."""
        while self._next() is not None and self._starting.acquire(blocking=False):
            stuck = False
            try:
                while not stuck and (message := self._next()) is not None:
                    stuck = not self._give(message)
            except FrogError as error:
                self.group.leave(False, f"{type(error).__name__}: {error}", error)
                return
            finally:
                self._starting.release()
            if stuck:
                break
        self._settle_demand()

    def _next(self) -> Sending | None:
        with self._lock:
            message = self._asked[0] if self._asked else next(iter(self._announced.values()), None)
            # Another thread may be about to announce it, and then looks here by itself.
            if message is None or not message.told:
                return None
            if message.asked:
                return message
            if message.size <= limits.INLINE_BYTES:
                fits = self._inline_sent - self._inline_over < UNASKED
            else:
                blocks, nbytes = self._client.given.held(self.handle)
                fits = not self._full and blocks < UNASKED and nbytes + message.size <= UNASKED_BYTES
            return message if fits else None

    def _settle_demand(self) -> None:
        with self._lock:
            wanted = bool(self._announced)
            changed, self._demand = wanted != self._demand, wanted
        if changed and wanted:
            self._client.connection.add_demand()
        elif changed:
            self._client.connection.drop_demand()

    def _give(self, message: Sending) -> bool:
        """Hand a message's bytes over; False where that needs a block that is not there yet."""
        block: Block | None = None
        if message.size > limits.INLINE_BYTES:
            block = self._block(message)
            if block is None:
                return False
        data = self._take_over(message, block)
        if data is None:
            if block is not None:
                self._client.leases.give_back(block)
        elif block is not None:
            self._write(message, data, block)
        else:
            n, dst, payload = message.n, message.rank, data.tobytes()
            self._client.connection.send(
                encode_mail_bytes(self.handle, n, INLINE, dst, 0, 0, message.size, payload)
            )
            self._complete(message, None)
        return True

    def _block(self, message: Sending) -> Block | None:
        try:
            return self._client.leases.take(message.size)
        except StoreFull:
            if message.asked:
                raise
            self._full = True
            return None

    def _take_over(self, message: Sending, block: Block | None) -> Bytes | None:
        """Take a message out of those that wait; None where it has failed, or is not wanted any more."""
        key = (message.rank, message.n)
        with self._lock:
            if message in self._asked:
                self._asked.remove(message)
            if self._announced.pop(key, None) is None:
                return None
            data, message.data = message.data, None
            if block is None:
                self._inline_sent += 1
            else:
                self._writing[key] = message
                self._client.given.hold(self.handle, key, block)
            return data

    def _write(self, message: Sending, data: Bytes, block: Block) -> None:
        """Copy into the arena, segment by segment, so that the receiver reads while the rest is copied."""
        client, key, size = self._client, (message.rank, message.n), message.size
        view = client.arena.view(block.seg, block.off, size)
        try:
            for start in range(0, size, SEGMENT_BYTES):
                if message.done:
                    return
                stop = min(start + SEGMENT_BYTES, size)
                np.copyto(view[start:stop], data[start:stop])
                client.connection.send(
                    encode_mail_bytes(self.handle, message.n, 0, message.rank, block.seg, block.off, stop)
                )
        finally:
            with self._lock:
                self._writing.pop(key, None)
            client.given.written(self.handle, key)
        self._complete(message, None)

    # ------------------------------------------------- what the peer says (leader's thread)
    def on_asked(self, told: MailAsked) -> None:
        """The receiver waits for a message that has only been announced."""
        with self._lock:
            message = self._announced.get((told.dst, told.n))
            if message is not None and not message.asked:
                message.asked = True
                self._asked.append(message)
        if message is not None:
            self.start()

    def on_done(self, told: MailDone) -> None:
        """Small messages are over (``dst`` ANY), or a message that was not given is not wanted."""
        with self._lock:
            message = None
            if told.dst == ANY:
                self._inline_over = max(self._inline_over, told.n)
            else:
                message = self._announced.pop((told.dst, told.n), None)
                if message is not None and message in self._asked:
                    self._asked.remove(message)
        if message is not None:
            self._complete(message, None)
        self.start()

    def freed(self) -> None:
        """A block has come free."""
        self._full = False
        self.start()

    def on_arrived(self, told: Arrived) -> None:
        """Bytes of a message stand ready."""
        message = self._receiving.get(told.n)
        flags, error = told.flags, None
        if message is not None:
            message.source = told.src
            if told.total != message.size:
                error = WireError(f"{told.total} bytes for {message.describe()} of {message.size}")
            elif flags & INLINE:
                message.put(np.frombuffer(told.payload, np.uint8))
            else:
                view = self._client.arena.view(told.seg, told.off, told.total)
                message.put(view[message.taken : told.ready])
        if flags & INLINE:
            self._read += 1
            if self._read - self._read_told >= SAY_READ:
                self._read_told = self._read
                self._client.connection.send(encode_mail_read(self.handle, self._read))
        elif flags & FINAL:
            self._client.connection.send(encode_mail_taken(self.handle, told.n))
        if message is not None and (error is not None or flags & FINAL):
            self._complete(message, error)

    def on_failed(self, told: MailFailed) -> None:
        """One message will not come, or not arrive."""
        error = from_code(told.code, told.text)
        message: Letter | None
        with self._lock:
            if told.dst < 0:
                message = self._receiving.get(told.n)
            else:
                key = (told.dst, told.n)
                message = self._announced.pop(key, None) or self._writing.get(key)
                self._asked = [one for one in self._asked if one is not message]
        if message is not None:
            self._complete(message, error)
        self._settle_demand()

    def _complete(self, message: Letter, error: FrogError | None) -> None:
        finish = message.finish
        if error is None and finish is not None:
            try:
                finish()
            except Exception as problem:
                logger.exception("copying out %s failed", message.describe())
                error = FrogError(f"copying out {message.describe()} failed: {problem}")
        with self._lock:
            if isinstance(message, Receiving):
                self._receiving.pop(message.n, None)
            self._waiting.pop(message, None)
            if message.done:
                return
            message.error = error
            message.done = True
            watchers, message.watchers = message.watchers, []
        message.release()
        for watcher in watchers:
            watcher(message)
            self._client.connection.drop_demand()

    # -------------------------------------------------------------------- endings
    def fail(self, error: FrogError) -> None:
        """The group has failed, or this rank has left it."""
        with self._lock:
            failed: list[Letter] = [*self._receiving.values(), *self._announced.values()]
            failed += self._writing.values()
            self._announced.clear()
            self._asked.clear()
        for message in failed:
            self._complete(message, again(error))
        self._settle_demand()

    @property
    def handed_over(self) -> bool:
        """Whether the peer has the bytes of every message that was sent."""
        return not self._announced and not self._writing
