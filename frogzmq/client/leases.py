"""Blocks of the arena that this rank has leased, kept for reuse: the pages of a used block are warm.

Nothing here waits. ``take`` hands out a free block or asks the peer for one; who got nothing is told by
the caller's own loop when ``Leased`` or ``Freed`` arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from frogzmq.errors import FrogError
from frogzmq.wire.ranks import Leased, encode_lease, encode_unlease

MIN_BLOCK = 1 << 20
COARSE = 1 << 26
"""Above this size blocks are multiples of a quarter of it, not powers of two: less is wasted."""
KEEP_BYTES = 512 << 20
"""Most that idle blocks may hold: enough for the buckets of one step, little beside a model."""


@dataclass(slots=True)
class Block:
    """One leased extent."""

    seg: int
    off: int
    size: int


def block_size(nbytes: int) -> int:
    """Round a contribution up to the size of the block that is leased for it."""
    if nbytes <= MIN_BLOCK:
        return MIN_BLOCK
    if nbytes <= COARSE:
        return 1 << (nbytes - 1).bit_length()
    step = COARSE // 4
    return -(-nbytes // step) * step


class LeasePool:
    """Free and asked-for blocks of one connection. Safe from any thread; the lock is never held in I/O."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._idle_bytes = 0
        self._busy = 0
        self._asked: dict[int, int] = {}
        self._next_req = 1
        self._refused: tuple[int, FrogError] | None = None

    def take(self, nbytes: int) -> Block | None:
        """Return a block of at least ``nbytes``, or None: one has been asked for, or must come free first.

        Raise the peer's ``StoreFull`` where it has refused and nothing of ours could come free.
        """
        size = block_size(nbytes)
        returned: list[Block] = []
        request = 0
        with self._lock:
            free = self._free.get(size)
            if free:
                self._idle_bytes -= size
                self._busy += 1
                return free.pop()
            if self._refused is not None and size >= self._refused[0]:
                if not self._idle_bytes:
                    if self._busy:
                        return None
                    error, self._refused = self._refused[1], None
                    raise error
                returned = self._drain(0)
                self._refused = None
            if size not in self._asked.values():
                request, self._next_req = self._next_req, self._next_req + 1
                self._asked[request] = size
        self._return(returned)
        if request:
            self._send(encode_lease(request, size))
        return None

    def on_leased(self, message: Leased) -> None:
        """The peer granted a request."""
        with self._lock:
            size = self._asked.pop(message.req, message.size)
            self._free.setdefault(size, []).append(Block(message.seg, message.off, size))
            self._idle_bytes += size
            self._refused = None

    def on_refused(self, req: int, error: FrogError) -> bool:
        """The peer refused request ``req``; False where that number is not ours."""
        with self._lock:
            size = self._asked.pop(req, None)
            if size is not None:
                self._refused = (size, error)
        return size is not None

    def give_back(self, block: Block) -> None:
        """The block may be used again; blocks beyond ``KEEP_BYTES`` of idle ones go back to the peer."""
        with self._lock:
            self._busy -= 1
            self._free.setdefault(block.size, []).append(block)
            self._idle_bytes += block.size
            returned = self._drain(KEEP_BYTES)
        self._return(returned)

    def _drain(self, keep: int) -> list[Block]:
        out = []
        for size in sorted(self._free, reverse=True):
            blocks = self._free[size]
            while blocks and self._idle_bytes > keep:
                self._idle_bytes -= size
                out.append(blocks.pop(0))
        return out

    def _return(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._send(encode_unlease(block.seg, block.off))
