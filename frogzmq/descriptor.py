"""What one rank says about the collective it calls; ranks of one op must say the same.

The canonical bytes of a descriptor are compared and hashed, so two ranks agree exactly when their
digests do. The op's number is hashed in too: op 7 of one rank never pairs with op 8 of another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from blake3 import blake3

from frogzmq.dtypes import dtype_of
from frogzmq.errors import WireError
from frogzmq.types import Digest, OpKind, ReduceOp

MAX_DESCRIPTOR_BYTES = 1024
MAX_DIMS = 64
MAX_NBYTES = 1 << 48
MAX_RANKS = 1 << 16
_CONTEXT = "frogzmq 2026 v1 descriptor"


@dataclass(frozen=True)
class Descriptor:
    """Kind, reduce op, dtype, shape of one rank's contribution, and global root rank (-1: none).

    ``shape`` is what each rank gives: for broadcast the tensor, for all_gather the input.
    """

    kind: OpKind
    reduce: ReduceOp
    dtype: str
    shape: tuple[int, ...]
    root: int = -1

    @cached_property
    def numel(self) -> int:
        """Elements in one contribution."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in one contribution."""
        return self.numel * dtype_of(self.dtype).itemsize

    @cached_property
    def encoded(self) -> bytes:
        """Canonical bytes: equal descriptors, equal bytes."""
        fields = [int(self.kind), int(self.reduce), self.dtype, list(self.shape), self.root]
        return json.dumps(fields, separators=(",", ":")).encode()

    def digest(self, seq: int) -> Digest:
        """Domain-separated BLAKE3 of the op number and the canonical bytes."""
        return _digest(self.encoded, seq)

    def describe(self) -> str:
        """One line for people: ``all_reduce(SUM) of float32[100, 2560]``."""
        reduce = f"({self.reduce.name})" if self.reduce else ""
        what = "" if self.kind == OpKind.BARRIER else f" of {self.dtype}{list(self.shape)}"
        root = f" root {self.root}" if self.root >= 0 else ""
        return f"{self.kind.name.lower()}{reduce}{what}{root}"


@lru_cache(maxsize=1024)
def _digest(encoded: bytes, seq: int) -> Digest:
    # Cached: it is asked for once per chunk that arrives.
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(seq.to_bytes(8, "little") + encoded)
    return Digest(hasher.digest())


@lru_cache(maxsize=4096)
def decode_descriptor(encoded: bytes) -> Descriptor:
    """Parse canonical bytes from a rank or a peer; ``WireError`` for anything else.

    Cached: a training loop repeats a handful of descriptors for ever.
    """
    if len(encoded) > MAX_DESCRIPTOR_BYTES:
        raise WireError(f"descriptor of {len(encoded)} bytes, limit {MAX_DESCRIPTOR_BYTES}")
    try:
        kind, reduce, dtype, shape, root = json.loads(encoded)
        if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMS:
            raise WireError("descriptor fields have wrong types")
        if type(root) is not int or any(type(n) is not int or n < 0 for n in shape):
            raise WireError("descriptor sizes and root must be integers")
        if not -1 <= root < MAX_RANKS:
            raise WireError(f"descriptor names root rank {root}, limit {MAX_RANKS - 1}")
        descriptor = Descriptor(OpKind(kind), ReduceOp(reduce), dtype, tuple(shape), root)
        if descriptor.nbytes > MAX_NBYTES:
            raise WireError(f"descriptor asks for {descriptor.nbytes} bytes, limit {MAX_NBYTES}")
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"descriptor is malformed: {error}") from None
    if descriptor.encoded != encoded:
        raise WireError("descriptor is not in canonical form")
    return descriptor
