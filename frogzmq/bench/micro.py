"""Hashing and folding alone, on one thread: what the pipeline is made of, in GB/s of input."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from frogzmq.content.chunks import CHUNK_BYTES, digest_chunk
from frogzmq.dtypes import dtype_of
from frogzmq.fold.kernels import fold_into
from frogzmq.types import ReduceOp

_TOTAL = 32 << 20
"""Bytes that one pass goes over: more than caches hold."""


def micro(seconds: float = 0.3) -> dict[str, float]:
    """Name -> GB/s (1e9 bytes of input per second), best of the passes that fit into ``seconds`` each.

    ``copy`` is a plain memcpy, to compare with. A fold's input is what it adds to what is there.
    """
    rng = np.random.default_rng(0)
    left = rng.random(_TOTAL // 4, dtype=np.float32).view(np.uint8)
    right = rng.random(_TOTAL // 4, dtype=np.float32).view(np.uint8)
    out = np.ones_like(left)  # touched, so that no pass pays for page faults

    def over_chunks(act: Callable[[int, int], object]) -> Callable[[], None]:
        def go() -> None:
            for start in range(0, _TOTAL, CHUNK_BYTES):
                act(start, min(start + CHUNK_BYTES, _TOTAL))

        return go

    def copy(start: int, stop: int) -> None:
        out[start:stop] = left[start:stop]

    def fold(dtype: str) -> Callable[[int, int], object]:
        kind = dtype_of(dtype)
        return lambda a, b: fold_into(out[a:b], [left[a:b], right[a:b]], kind, ReduceOp.SUM)

    jobs: dict[str, Callable[[], None]] = {
        "copy": over_chunks(copy),
        "hash": over_chunks(lambda a, b: digest_chunk(left[a:b])),
        "fold float32": over_chunks(fold("float32")),
    }
    figures = {name: _rate(job, seconds) for name, job in jobs.items()}
    # Random float32 bytes read as halves would hold NaNs and infinities: ones of float16 instead.
    halves = np.full(_TOTAL // 2, 0x3C00, dtype=np.uint16).view(np.uint8)
    left[:], right[:] = halves, halves
    for dtype in ("bfloat16", "float16"):
        figures[f"fold {dtype}"] = _rate(over_chunks(fold(dtype)), seconds)
    return figures


def _rate(job: Callable[[], None], seconds: float) -> float:
    best, until = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        job()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            return _TOTAL / best / 1e9
