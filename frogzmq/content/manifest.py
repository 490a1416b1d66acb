"""Manifests: the ordered chunk digests of a tensor; roots: one digest that stands for the list.

A root is a digest over the number of chunks and their digests in order. Above ``FANOUT`` chunks the
list is first folded into nodes of ``FANOUT`` digests each, level by level, so that no hash input is
long and a subtree can be checked by itself. Chunk, node and root inputs cannot be mistaken for one
another: chunks use another BLAKE3 context, and nodes and roots begin with different headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from frogzmq.content.chunks import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Buffer,
    bounds,
    chunk_hasher,
    digest_chunk,
    matches,
)
from frogzmq.errors import WireError
from frogzmq.types import Digest

FANOUT = 1024
"""Digests in one node: 32 KiB of hash input."""

_MANIFEST = blake3(derive_key_context="frogzmq 2026 v1 manifest")
_NODE, _ROOT = b"n", b"r"


def _hash(kind: bytes, level: int, count: int, digests: Sequence[Digest]) -> Digest:
    hasher = _MANIFEST.copy()
    hasher.update(kind + bytes((level,)) + count.to_bytes(8, "little") + b"".join(digests))
    return Digest(hasher.digest())


def root_of(digests: Sequence[Digest]) -> Digest:
    """Root of a list of chunk digests; ``WireError`` where one is not 32 bytes long."""
    for place, digest in enumerate(digests):
        if len(digest) != DIGEST_BYTES:
            raise WireError(f"digest {place} of a manifest has {len(digest)} bytes, not {DIGEST_BYTES}")
    count, level, row = len(digests), 0, digests
    while len(row) > FANOUT:
        starts = range(0, len(row), FANOUT)
        row = [_hash(_NODE, level, len(row[i : i + FANOUT]), row[i : i + FANOUT]) for i in starts]
        level += 1
    return _hash(_ROOT, level, count, row)


@dataclass(frozen=True)
class Manifest:
    """The chunk digests of some bytes, in order."""

    digests: tuple[Digest, ...]

    @cached_property
    def root(self) -> Digest:
        """The digest that stands for the list."""
        return root_of(self.digests)

    @classmethod
    def of(cls, buf: Buffer, ranges: Iterable[tuple[int, int]] | None = None) -> Manifest:
        """Hash ``buf`` cut at ``ranges`` (default: equal chunks of ``CHUNK_BYTES``)."""
        view = np.frombuffer(buf, np.uint8)
        cut = bounds(view.size, CHUNK_BYTES) if ranges is None else ranges
        return cls(tuple(digest_chunk(view[start:stop]) for start, stop in cut))

    def diff(self, other: Manifest) -> tuple[int, ...]:
        """Places whose chunk differs or which only one of the two has, ascending."""
        mine, theirs = self.digests, other.digests
        shared = min(len(mine), len(theirs))
        changed = [i for i in range(shared) if mine[i] != theirs[i]]
        return (*changed, *range(shared, max(len(mine), len(theirs))))

    def broken(self, buf: Buffer, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Places whose bytes in ``buf`` do not match; ``WireError`` where the cut has another length."""
        if len(ranges) != len(self.digests):
            raise WireError(f"manifest of {len(self.digests)} chunks for bytes cut in {len(ranges)}")
        view = np.frombuffer(buf, np.uint8)
        return tuple(
            place
            for place, ((start, stop), digest) in enumerate(zip(ranges, self.digests, strict=True))
            if not matches(view[start:stop], digest)
        )


class Tally:
    """The root of bytes that come in pieces, cut every ``CHUNK_BYTES`` wherever the pieces end.

    ``Manifest.of(whole).root`` without the whole. The cut does not depend on how the bytes travelled, so
    roots of equal bytes are equal whatever machines, modes and pieces they came by.
    """

    __slots__ = ("_digests", "_hasher", "_room")

    def __init__(self) -> None:
        self._digests: list[Digest] = []
        self._hasher, self._room = chunk_hasher(), CHUNK_BYTES

    def feed(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes."""
        at, size = 0, len(data)
        while at < size:
            if not self._room:
                self._end_chunk()
            take = min(self._room, size - at)
            self._hasher.update(cast(bytes, data[at : at + take]))
            self._room -= take
            at += take

    def _end_chunk(self) -> None:
        self._digests.append(Digest(self._hasher.digest()))
        self._hasher, self._room = chunk_hasher(), CHUNK_BYTES

    def root(self) -> Digest:
        """The root of everything so far; the tally can go on afterwards."""
        return root_of([*self._digests, Digest(self._hasher.digest())])


def tensor_root(data: NDArray[np.uint8]) -> Digest:
    """The root of a tensor's bytes, cut every ``CHUNK_BYTES``: the same on every machine."""
    if len(data) <= CHUNK_BYTES:
        return root_of([digest_chunk(data)])
    return root_of([digest_chunk(data[start:stop]) for start, stop in bounds(len(data))])
