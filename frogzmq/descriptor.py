"""What one rank says about the collective it calls; ranks of one op must say the same.

The canonical bytes of a descriptor are compared and hashed, so two ranks agree exactly when their
digests do. The op's number is hashed in too: op 7 of one rank never pairs with op 8 of another.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from blake3 import blake3

from frogzmq.dtypes import dtype_of
from frogzmq.errors import WireError
from frogzmq.types import Digest, OpKind, ReduceOp

MAX_DESCRIPTOR_BYTES = 48 << 10
MAX_DIMS = 64
MAX_NBYTES = 1 << 48
MAX_RANKS = 1 << 16
SPLITS_SHOWN = 16
"""Longer splits are named by their first numbers and a digest."""
CACHED_BYTES = 1024
"""Descriptors up to this length are remembered by the thousand, longer ones by the dozen."""
_CONTEXT = "frogzmq 2026 v1 descriptor"

ROOTED = (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER)
"""Kinds that need a root rank."""
SPLIT = (OpKind.ALL_GATHER, OpKind.GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)
"""Kinds that may be uneven."""


@dataclass(frozen=True)
class Descriptor:
    """Kind, reduce op, dtype, shape of one rank's contribution, global root rank (-1: none), splits.

    ``shape`` is what each rank gives: for broadcast the tensor, for all_gather the input; for scatter what
    each rank gets. ``splits`` (elements) makes an op uneven, and then ``shape`` holds their sum: what each
    rank gives (all_gather, gather), the slice that each rank gets (reduce_scatter), or for all_to_all the
    square matrix, row by row, of what rank s gives to rank d: ``splits[s * world + d]``.
    """

    kind: OpKind
    reduce: ReduceOp
    dtype: str
    shape: tuple[int, ...]
    root: int = -1
    splits: tuple[int, ...] = ()

    @cached_property
    def numel(self) -> int:
        """Elements in ``shape``."""
        return prod(self.shape)

    @cached_property
    def itemsize(self) -> int:
        """Bytes in one element."""
        return dtype_of(self.dtype).itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes in ``shape``: one contribution, where the op is even."""
        return self.numel * self.itemsize

    @cached_property
    def encoded(self) -> bytes:
        """Canonical bytes: equal descriptors, equal bytes."""
        fields = [int(self.kind), int(self.reduce), self.dtype, list(self.shape), self.root]
        if self.splits:
            fields.append(list(self.splits))
        return json.dumps(fields, separators=(",", ":")).encode()

    def digest(self, seq: int) -> Digest:
        """Domain-separated BLAKE3 of the op number and the canonical bytes."""
        return _digest(self.encoded, seq)

    # ------------------------------------------------------------------- each rank
    def blocks(self, rank: int, world: int) -> list[int]:
        """Bytes of each block that ``rank`` gives, where what it gives is dealt out (else: one block)."""
        if self.kind == OpKind.SCATTER:
            return [self.nbytes] * world
        if self.kind not in (OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
            return [self.gives(rank, world)]
        if not self.splits:
            return [self.nbytes // world] * world
        row = self.splits if self.kind == OpKind.REDUCE_SCATTER else self.splits[rank * world :][:world]
        return [count * self.itemsize for count in row]

    def gives(self, rank: int, world: int) -> int:
        """Bytes that ``rank`` contributes; 0 also where it contributes nothing at all."""
        if self.kind == OpKind.SCATTER:
            return self.nbytes * world if rank == self.root else 0
        if self.kind == OpKind.BROADCAST:
            return self.nbytes if rank == self.root else 0
        if not self.splits or self.kind == OpKind.REDUCE_SCATTER:
            return self.nbytes
        if self.kind == OpKind.ALL_TO_ALL:
            return sum(self.splits[rank * world : (rank + 1) * world]) * self.itemsize
        return self.splits[rank] * self.itemsize

    def gets(self, rank: int, world: int) -> int:
        """Bytes of ``rank``'s result; -1 where it gets no data."""
        kind = self.kind
        if kind == OpKind.BARRIER:
            return -1
        if kind in (OpKind.REDUCE, OpKind.GATHER) and rank != self.root:
            return -1
        if kind == OpKind.BROADCAST and rank == self.root:
            return -1
        if kind in (OpKind.ALL_GATHER, OpKind.GATHER):
            return self.nbytes if self.splits else self.nbytes * world
        if kind == OpKind.REDUCE_SCATTER:
            return self.splits[rank] * self.itemsize if self.splits else self.nbytes // world
        if kind == OpKind.ALL_TO_ALL and self.splits:
            return sum(self.splits[rank::world]) * self.itemsize
        return self.nbytes

    def misfit(self, ranks: Collection[int]) -> str:
        """Why a group of these ranks cannot run the op; empty where it can."""
        world, kind = len(ranks), self.kind
        if kind in ROOTED and self.root not in ranks:
            return f"no such root rank in this group of ranks {sorted(ranks)}"
        if self.splits:
            wanted = world * world if kind == OpKind.ALL_TO_ALL else world
            if len(self.splits) != wanted:
                return f"{len(self.splits)} splits in a group of {world} ranks, which needs {wanted}"
        elif kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL) and self.numel % world:
            return f"{self.numel} elements cannot be dealt out evenly to {world} ranks; give splits"
        return ""

    def describe(self) -> str:
        """One line for people: ``all_reduce(SUM) of float32[100, 2560]``."""
        reduce = f"({self.reduce.name})" if self.reduce else ""
        what = "" if self.kind == OpKind.BARRIER else f" of {self.dtype}{list(self.shape)}"
        root = f" root {self.root}" if self.root >= 0 else ""
        return f"{self.kind.name.lower()}{reduce}{what}{root}{self._describe_splits()}"

    def _describe_splits(self) -> str:
        if not self.splits:
            return ""
        if len(self.splits) <= SPLITS_SHOWN:
            return f" splits {list(self.splits)}"
        first = ", ".join(map(str, self.splits[:SPLITS_SHOWN]))
        tag = blake3(self.encoded).hexdigest()[:8]
        return f" splits [{first}, ...] ({len(self.splits)} numbers, digest {tag})"


@lru_cache(maxsize=1024)
def _digest(encoded: bytes, seq: int) -> Digest:
    # Cached: it is asked for once per chunk that arrives.
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(seq.to_bytes(8, "little") + encoded)
    return Digest(hasher.digest())


def decode_descriptor(encoded: bytes) -> Descriptor:
    """Parse canonical bytes from a rank or a peer; ``WireError`` for anything else.

    Cached: a training loop repeats a handful of descriptors for ever.
    """
    return _decode_small(encoded) if len(encoded) <= CACHED_BYTES else _decode_large(encoded)


def _decode(encoded: bytes) -> Descriptor:
    if len(encoded) > MAX_DESCRIPTOR_BYTES:
        raise WireError(f"descriptor of {len(encoded)} bytes, limit {MAX_DESCRIPTOR_BYTES}")
    try:
        kind, reduce, dtype, shape, root, *rest = json.loads(encoded)
        splits = rest[0] if len(rest) == 1 else []
        if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(splits) or len(rest) > 1:
            raise WireError("descriptor fields have wrong types")
        if type(root) is not int or len(shape) > MAX_DIMS:
            raise WireError(f"descriptor's root must be an integer, and dimensions at most {MAX_DIMS}")
        if not -1 <= root < MAX_RANKS:
            raise WireError(f"descriptor names root rank {root}, limit {MAX_RANKS - 1}")
        descriptor = Descriptor(OpKind(kind), ReduceOp(reduce), dtype, tuple(shape), root, tuple(splits))
        if descriptor.nbytes > MAX_NBYTES:
            raise WireError(f"descriptor asks for {descriptor.nbytes} bytes, limit {MAX_NBYTES}")
        if splits and (descriptor.kind not in SPLIT or sum(splits) != descriptor.numel):
            raise WireError(f"{descriptor.describe()}: splits do not belong to this kind, or to this shape")
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"descriptor is malformed: {error}") from None
    if descriptor.encoded != encoded:
        raise WireError("descriptor is not in canonical form")
    return descriptor


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


_decode_small = lru_cache(maxsize=4096)(_decode)
_decode_large = lru_cache(maxsize=32)(_decode)
