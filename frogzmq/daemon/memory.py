"""What the C library does with memory that ZeroMQ frees.

Every received chunk is a buffer of its own. glibc maps and unmaps buffers of that size one by one, and each
new page is zeroed by the kernel when it is first touched: at 64 MiB an op that cost as much as the copy
itself. Kept on the heap, the same pages serve the next op. What is kept is bounded, and given back when the
peer is idle.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

log = logging.getLogger("frogzmq.peer")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From malloc.h of glibc."""
KEEP_BYTES = 256 << 20
"""Free heap above this is given back at once."""
MMAP_BYTES = 32 << 20
"""Buffers up to this size (glibc's largest threshold) come from the heap."""


def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


def keep_freed_buffers() -> bool:
    """Keep freed buffers for reuse; call before threads start. False where the C library is not glibc."""
    libc = _libc()
    if libc is None:
        log.debug("no mallopt in this C library: freed buffers go back to the kernel one by one")
        return False
    # One arena: otherwise the thread that receives and the one that frees work on different heaps.
    return bool(
        libc.mallopt(M_ARENA_MAX, 1)
        and libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        and libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
    )


def give_back() -> None:
    """Return free heap to the kernel; for a peer that has become idle."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
