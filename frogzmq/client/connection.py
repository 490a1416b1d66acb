"""The datagram connection to this machine's peer, shared by all threads of the rank.

Sending is safe from any thread. Receiving belongs to one thread at a time, the *leader*:

* a thread that waits for something takes the lead if it is free and reads the socket itself, so a small
  op costs no hop between threads;
* who waits while another leads is a *follower*, woken when what it waits for is there, or the lead is free;
* a background thread takes the lead only while there is *demand*: somebody wants to be told (a future, a
  queued op) and need not be waiting.

The leader hands every message to ``dispatch``, which never blocks and never runs the user's code.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from frogzmq.errors import FrogError, PeerUnreachable, WireError
from frogzmq.wire import limits
from frogzmq.wire.ranks import FROM_PEER, Assembler, Datagram, Json, encode_json

logger = logging.getLogger("frogzmq")

T = TypeVar("T")
TICK_S = 0.2
"""How often a leader looks at deadlines while nothing arrives: a wake-up costs about 20 us."""
SEND_TIMEOUT_S = 30
"""How long the peer may leave its socket unread before it counts as gone."""


class Waitable(Protocol):
    """Anything that a thread can wait for: ``done`` turns true once, in the leader's thread."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        ...


class Connection:
    """One ``SOCK_SEQPACKET`` connection: sends, and the lead."""

    def __init__(
        self,
        sock: socket.socket,
        dispatch: Callable[[Datagram], None],
        on_tick: Callable[[float], None],
        on_lost: Callable[[FrogError], None],
    ) -> None:
        sock.settimeout(None)
        timeval = "ll"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack(timeval, 0, int(TICK_S * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack(timeval, SEND_TIMEOUT_S, 0))
        self._sock = sock
        self._dispatch = dispatch
        self._on_tick = on_tick
        self._on_lost = on_lost
        self._assembler = Assembler(FROM_PEER)
        self._buffer = memoryview(bytearray(limits.DATAGRAM_BYTES + 1))
        self._json_lock = threading.Lock()
        self._lead = threading.Lock()
        self._turn = threading.Condition(threading.Lock())
        self._followers = 0
        self._demand = 0
        self._thread: threading.Thread | None = None
        self._next_tick = time.monotonic() + TICK_S
        self._closed = False
        self.lost: FrogError | None = None
        """Why nothing can be sent or received any more."""

    # ------------------------------------------------------------------ sending
    def send(self, datagram: bytes) -> None:
        """Send one datagram from any thread; ``PeerUnreachable`` where the peer is gone or stuck."""
        try:
            self._sock.send(datagram)
        except OSError as error:
            raise self._lose(_why(error, "sending")) from None

    def send_json(self, message: Json) -> None:
        """Send one JSON message, in as many datagrams as it needs."""
        with self._json_lock:
            for piece in encode_json(message):
                self.send(piece)

    # ---------------------------------------------------------------- receiving
    def wait_for(self, what: Waitable, deadline: float) -> bool:
        """Lead or follow until ``what.done`` or ``deadline`` (monotonic seconds); return ``what.done``."""
        while not what.done and self.lost is None:
            if self._lead.acquire(blocking=False):
                try:
                    self._receive_until(what, deadline)
                finally:
                    self._give_lead_back()
            else:
                self._follow(what, deadline)
            if not what.done and time.monotonic() >= deadline:
                break
        return what.done

    def pump(self) -> None:
        """Take in what has already arrived, unless another thread is doing so."""
        if self.lost is not None or not self._lead.acquire(blocking=False):
            return
        try:
            while self._receive(socket.MSG_DONTWAIT):
                pass
        finally:
            self._give_lead_back()

    def _receive_until(self, what: Waitable, deadline: float) -> None:
        while not what.done and self.lost is None:
            left = deadline - time.monotonic()
            if left < TICK_S and not self._readable(left):
                return
            self._receive(0)

    def _readable(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def _receive(self, flags: int) -> bool:
        """Read and dispatch one datagram; False where none came in a tick (or at once: MSG_DONTWAIT)."""
        size = -1
        try:
            size = self._sock.recv_into(self._buffer, 0, flags)
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionResetError:
            # The peer closed before it had read everything. Told once, ahead of what it had sent until
            # then, which says why.
            return True
        except OSError as error:
            self._lose(_why(error, "receiving"))
            return False
        if size == 0:
            self._lose("it has closed the connection (stopped, or killed)")
            return False
        if size > 0:
            self._take(self._buffer[:size])
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._unless_lost(self._on_tick, now)
        return size > 0

    def _take(self, datagram: memoryview) -> None:
        try:
            message = self._assembler.feed(datagram)
        except WireError as error:
            self._lose(f"it sent what this release does not understand: {error}", error)
            return
        if message is not None:
            self._unless_lost(self._dispatch, message)
            if self._followers:
                self._wake()

    def _unless_lost(self, handle: Callable[[T], None], what: T) -> None:
        """Handle it; that an answer could not be sent does not matter where the connection has ended."""
        try:
            handle(what)
        except FrogError:
            if self.lost is None:
                raise

    def _give_lead_back(self) -> None:
        self._lead.release()
        if self._followers or self._demand:
            self._wake()

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def _follow(self, what: Waitable, deadline: float) -> None:
        with self._turn:
            self._followers += 1
            try:
                # The lead may have become free before this thread counted as a follower.
                if not what.done and self._lead.locked():
                    self._turn.wait(max(0.0, min(TICK_S, deadline - time.monotonic())))
            finally:
                self._followers -= 1

    # --------------------------------------------------------------- background
    def add_demand(self) -> None:
        """From now on somebody wants news without waiting: the background thread leads when nobody does."""
        with self._turn:
            self._demand += 1
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._background, name="frogzmq-lead", daemon=True)
                self._thread.start()
            elif self._demand == 1:
                self._turn.notify_all()

    def drop_demand(self) -> None:
        """Undo one ``add_demand``."""
        with self._turn:
            self._demand -= 1

    def _background(self) -> None:
        while True:
            with self._turn:
                while not self._closed and (self._demand <= 0 or self._lead.locked()):
                    self._turn.wait(None if self._demand <= 0 else TICK_S)
            if self._closed or self.lost is not None:
                return
            if not self._lead.acquire(blocking=False):
                continue
            try:
                # A waiting thread takes over after the current message: it then needs no hop for the next.
                while self._demand > 0 and not self._followers and not self._closed and self.lost is None:
                    self._receive(0)
            finally:
                self._give_lead_back()
            if self._followers:
                time.sleep(0)

    # -------------------------------------------------------------------- ending
    def _lose(self, reason: str, error: FrogError | None = None) -> FrogError:
        """Record that the connection is gone, once, and tell."""
        if self.lost is None:
            self.lost = error or PeerUnreachable(f"lost this machine's peer: {reason}")
            self._on_lost(self.lost)
            self._wake()
        return self.lost

    def close(self, why: FrogError) -> None:
        """Stop receiving, wake and join the background thread; idempotent."""
        self._closed = True
        self._lose("closed", why)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
        self._sock.close()


def _why(error: OSError, doing: str) -> str:
    if isinstance(error, BlockingIOError):
        return f"it has not read its socket for {SEND_TIMEOUT_S} s"
    return f"{doing}: {error.strerror or error}"
