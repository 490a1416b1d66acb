"""Chunks: bytes named by their BLAKE3 digest, taken whole and verified or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from hmac import compare_digest
from typing import TypeAlias, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from frogzmq.errors import IntegrityError
from frogzmq.types import Digest

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""Default size of a chunk: large enough that a message costs little, small enough to pipeline."""

DIGEST_BYTES = 32

# Deriving the key of a context costs more than hashing a small chunk, so it is done once and copied.
_CHUNK = blake3(derive_key_context="frogzmq 2026 v1 chunk")


def digest_chunk(buf: Buffer) -> Digest:
    """BLAKE3 of the bytes under the chunk context, so that no other digest can pass for a chunk's.

    ``buf`` is any contiguous buffer. The interpreter lock is released while large buffers are hashed.
    """
    hasher = _CHUNK.copy()
    hasher.update(cast(bytes, buf))  # an array is a buffer too; Python 3.11's types cannot say so
    return Digest(hasher.digest())


def chunk_hasher() -> blake3:
    """A hasher whose digest, of all bytes that it was given, is the one that ``digest_chunk`` gives."""
    return _CHUNK.copy()


def matches(buf: Buffer, digest: Digest) -> bool:
    """Whether the bytes are the ones that ``digest`` names."""
    return compare_digest(digest_chunk(buf), digest)


def verify(buf: Buffer, digest: Digest, what: str = "chunk") -> None:
    """Raise ``IntegrityError`` naming ``what`` unless the bytes are the ones that ``digest`` names."""
    if not matches(buf, digest):
        raise IntegrityError(
            f"{what}: {memoryview(cast(bytes, buf)).nbytes} bytes do not match digest {digest.hex()[:16]}..."
        )


def bounds(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Byte ranges ``(start, stop)`` of equal chunks (the last may be short); one empty range for no bytes."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, must be at least 1")
    for start in range(0, max(nbytes, 1), chunk_bytes):
        yield start, min(nbytes, start + chunk_bytes)
