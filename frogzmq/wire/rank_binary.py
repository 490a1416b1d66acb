"""The binary datagrams between a rank and its peer: named tuples, their layout, ``encode_*`` and decoders.

Users import ``frogzmq.wire.ranks``, which re-exports what is public here. ``encode_*`` trusts its caller
and packs; the decoders trust nobody and raise ``WireError`` (or ``struct.error`` where bytes are missing,
which ``ranks.decode`` turns into one).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

from frogzmq.errors import WireError
from frogzmq.wire.limits import DESCRIPTOR_BYTES, INLINE_BYTES, TENSOR_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

INLINE = 1
"""Flag of Post and Result: the bytes follow in the datagram, all of them."""
NODATA = 2
"""Flag of Post: the rank calls the op and gives no bytes. Of Result: the rank gets none."""
FINAL = 4
"""Flag of Result: it is complete."""

LEASE, POST, READY, CONSUMED, EXPLAIN, UNLEASE, GOT = 3, 4, 5, 6, 8, 12, 13
LEASED, RESULT, FREED, VERIFIED = 66, 67, 69, 74
_SEQ_END = _OFF_END = 1 << 63
_RANGES = (
    f"op numbers are 1 to 2**63 - 1, sizes at most {TENSOR_BYTES}, offsets below 2**63, ready within size"
)


class Lease(NamedTuple):
    """A rank asks for ``size`` bytes of the arena; ``req`` is its number for the answer."""

    req: int
    size: int


class Post(NamedTuple):
    """A rank calls op ``seq``: its contribution of ``nbytes`` is inline, or at (``seg``, ``off``).

    The first ``ready`` bytes can be read now. ``payload`` is a view of the datagram.
    """

    handle: int
    seq: int
    flags: int
    seg: int
    off: int
    nbytes: int
    ready: int
    descriptor: bytes
    payload: Buffer = b""


class Ready(NamedTuple):
    """The first ``ready`` bytes of the contribution to op ``seq`` can be read."""

    handle: int
    seq: int
    ready: int


class Consumed(NamedTuple):
    """The rank has copied its result of op ``seq`` out of the arena."""

    handle: int
    seq: int


class Got(NamedTuple):
    """The rank has its result of op ``seq``, and ``root`` stands for the bytes: Consumed with a receipt."""

    handle: int
    seq: int
    root: bytes


class Explain(NamedTuple):
    """A rank asks what op ``seq`` waits for."""

    handle: int
    seq: int


class Unlease(NamedTuple):
    """The rank gives the extent at (``seg``, ``off``) back."""

    seg: int
    off: int


class Leased(NamedTuple):
    """Answer to Lease: the extent."""

    req: int
    seg: int
    off: int
    size: int


class Result(NamedTuple):
    """The first ``ready`` of ``total`` bytes of op ``seq``'s result are inline, or at (``seg``, ``off``).

    Inline and no-data results are final. ``payload`` is a view of the datagram.
    """

    handle: int
    seq: int
    flags: int
    seg: int
    off: int
    ready: int
    total: int
    payload: Buffer = b""


class Freed(NamedTuple):
    """The rank's contribution to op ``seq`` is not needed any more: its extent may be used again."""

    handle: int
    seq: int


class Verified(NamedTuple):
    """Everybody agrees on op ``seq``: the rank may go on with its result."""

    handle: int
    seq: int


Pair = TypeVar("Pair", Consumed, Explain, Freed, Verified)
Binary: TypeAlias = (
    Lease | Post | Ready | Consumed | Explain | Unlease | Leased | Result | Freed | Got | Verified
)

BINARY: tuple[tuple[int, type[Binary], str | tuple[str, ...]], ...] = (
    (LEASE, Lease, "IQ"), (POST, Post, "IQBHQQQH"), (READY, Ready, "IQQ"), (CONSUMED, Consumed, "IQ"),
    (EXPLAIN, Explain, "IQ"), (UNLEASE, Unlease, "HQ"), (LEASED, Leased, "IHQQ"), (RESULT, Result, "IQBHQQQ"),
    (FREED, Freed, "IQ"), (GOT, Got, ("I", "Q", "32s")), (VERIFIED, Verified, "IQ"),
)  # fmt: skip
"""Kind, type, and ``struct`` codes of what follows the kind byte. Post's last code is the length of its
descriptor, which follows the struct; an inline payload follows that."""
STRUCTS = {kind: struct.Struct("<B" + "".join(codes)) for kind, _, codes in BINARY}

_lease, _post, _ready = STRUCTS[LEASE], STRUCTS[POST], STRUCTS[READY]
_consumed, _explain, _unlease = STRUCTS[CONSUMED], STRUCTS[EXPLAIN], STRUCTS[UNLEASE]
_leased, _result, _freed = STRUCTS[LEASED], STRUCTS[RESULT], STRUCTS[FREED]
_got, _verified = STRUCTS[GOT], STRUCTS[VERIFIED]
POST_BYTES, RESULT_BYTES = _post.size, _result.size


# -------------------------------------------------------------------- encode
def encode_lease(req: int, size: int) -> bytes:
    """Pack a ``Lease``."""
    return _lease.pack(LEASE, req, size)


def encode_post(
    handle: int, seq: int, flags: int, seg: int, off: int, nbytes: int, ready: int,
    descriptor: bytes, payload: Buffer = b"",
) -> bytes:  # fmt: skip
    """Pack a ``Post``. Without ``payload`` the caller sends it behind (``sendmsg``) where INLINE is set."""
    head = _post.pack(POST, handle, seq, flags, seg, off, nbytes, ready, len(descriptor))
    return b"".join((head, descriptor, payload))


def encode_ready(handle: int, seq: int, ready: int) -> bytes:
    """Pack a ``Ready``."""
    return _ready.pack(READY, handle, seq, ready)


def encode_consumed(handle: int, seq: int) -> bytes:
    """Pack a ``Consumed``."""
    return _consumed.pack(CONSUMED, handle, seq)


def encode_explain(handle: int, seq: int) -> bytes:
    """Pack an ``Explain``."""
    return _explain.pack(EXPLAIN, handle, seq)


def encode_unlease(seg: int, off: int) -> bytes:
    """Pack an ``Unlease``."""
    return _unlease.pack(UNLEASE, seg, off)


def encode_leased(req: int, seg: int, off: int, size: int) -> bytes:
    """Pack a ``Leased``."""
    return _leased.pack(LEASED, req, seg, off, size)


def encode_result(
    handle: int, seq: int, flags: int, seg: int, off: int, ready: int, total: int, payload: Buffer = b""
) -> bytes:
    """Pack a ``Result``. Without ``payload`` the caller sends it behind (``sendmsg``) where INLINE is set."""
    head = _result.pack(RESULT, handle, seq, flags, seg, off, ready, total)
    return b"".join((head, payload)) if payload else head


def encode_freed(handle: int, seq: int) -> bytes:
    """Pack a ``Freed``."""
    return _freed.pack(FREED, handle, seq)


def encode_got(handle: int, seq: int, root: bytes) -> bytes:
    """Pack a ``Got``; ``root`` has 32 bytes."""
    return _got.pack(GOT, handle, seq, root)


def encode_verified(handle: int, seq: int) -> bytes:
    """Pack a ``Verified``."""
    return _verified.pack(VERIFIED, handle, seq)


# -------------------------------------------------------------------- decode
# Written flat, and with ``tuple.__new__`` instead of the named tuples' own constructor, because each call
# costs as much as the rest of the decoder. The ``x`` in place of the kind byte leaves just the fields.
_BODIES = {kind: struct.Struct("<x" + "".join(codes)) for kind, _, codes in BINARY}
_lease_body, _post_body, _ready_body = _BODIES[LEASE].unpack, _BODIES[POST].unpack_from, _BODIES[READY].unpack
_unlease_body, _leased_body = _BODIES[UNLEASE].unpack, _BODIES[LEASED].unpack
_result_body = _BODIES[RESULT].unpack_from
_new = tuple.__new__


def _decode_post(datagram: Buffer) -> Post:
    handle, seq, flags, seg, off, nbytes, ready, length = _post_body(datagram)
    end = POST_BYTES + length
    rest = len(datagram) - end
    if length > DESCRIPTOR_BYTES or rest < 0:
        raise WireError(f"Post with a descriptor of {length} bytes in a datagram of {len(datagram)}")
    if not 0 < seq < _SEQ_END or not ready <= nbytes <= TENSOR_BYTES or off >= _OFF_END:
        raise WireError(f"Post of op {seq} with {ready} of {nbytes} bytes ready at {off}: {_RANGES}")
    descriptor = bytes(datagram[POST_BYTES:end])
    if flags == INLINE:
        if not rest == nbytes == ready <= INLINE_BYTES:
            raise WireError(
                f"inline Post says {ready} of {nbytes} bytes and has {rest}; limit {INLINE_BYTES}"
            )
        payload = memoryview(datagram)[end:]
        return _new(Post, (handle, seq, flags, seg, off, nbytes, ready, descriptor, payload))
    if rest or flags not in (0, NODATA):
        raise WireError(f"Post with flags {flags} and {rest} bytes behind its descriptor")
    return _new(Post, (handle, seq, flags, seg, off, nbytes, ready, descriptor, b""))


def _decode_ready(datagram: Buffer) -> Ready:
    fields = _ready_body(datagram)
    if not 0 < fields[1] < _SEQ_END or fields[2] > TENSOR_BYTES:
        raise WireError(f"Ready of op {fields[1]} with {fields[2]} bytes: {_RANGES}")
    return _new(Ready, fields)


def _decode_result(datagram: Buffer) -> Result:
    fields = _result_body(datagram)
    _, seq, flags, _, off, ready, total = fields
    rest = len(datagram) - RESULT_BYTES
    if not 0 < seq < _SEQ_END or not ready <= total <= TENSOR_BYTES or off >= _OFF_END:
        raise WireError(f"Result of op {seq} with {ready} of {total} bytes ready at {off}: {_RANGES}")
    if flags == INLINE | FINAL:
        if not rest == total == ready <= INLINE_BYTES:
            raise WireError(
                f"inline Result says {ready} of {total} bytes and has {rest}; limit {INLINE_BYTES}"
            )
        return _new(Result, (*fields, memoryview(datagram)[RESULT_BYTES:]))
    if rest or flags not in (0, FINAL, NODATA | FINAL) or (flags == FINAL and ready != total):
        raise WireError(f"Result with flags {flags}, {ready} of {total} bytes ready, {rest} bytes behind it")
    return _new(Result, (*fields, b""))


def _pair_decoder(kind: int, cls: type[Pair]) -> Callable[[Buffer], Pair]:
    """Build the decoder of a kind that is (handle, seq) and nothing else."""
    unpack = _BODIES[kind].unpack

    def decode_pair(datagram: Buffer) -> Pair:
        fields = unpack(datagram)
        if not 0 < fields[1] < _SEQ_END:
            raise WireError(f"{cls.__name__} of op {fields[1]}: {_RANGES}")
        return _new(cls, fields)

    return decode_pair


def _decode_lease(datagram: Buffer) -> Lease:
    req, size = _lease_body(datagram)
    if size > TENSOR_BYTES:
        raise WireError(f"Lease of {size} bytes: {_RANGES}")
    return Lease(req, size)


def _decode_unlease(datagram: Buffer) -> Unlease:
    seg, off = _unlease_body(datagram)
    if off >= _OFF_END:
        raise WireError(f"Unlease at {off}: {_RANGES}")
    return Unlease(seg, off)


def _decode_leased(datagram: Buffer) -> Leased:
    req, seg, off, size = _leased_body(datagram)
    if size > TENSOR_BYTES or off >= _OFF_END:
        raise WireError(f"Leased of {size} bytes at {off}: {_RANGES}")
    return Leased(req, seg, off, size)


def _decode_got(datagram: Buffer) -> Got:
    fields = _BODIES[GOT].unpack(datagram)
    if not 0 < fields[1] < _SEQ_END:
        raise WireError(f"Got of op {fields[1]}: {_RANGES}")
    return _new(Got, fields)


DECODERS: dict[int, Callable[[Buffer], Binary]] = {
    LEASE: _decode_lease,
    POST: _decode_post,
    READY: _decode_ready,
    CONSUMED: _pair_decoder(CONSUMED, Consumed),
    EXPLAIN: _pair_decoder(EXPLAIN, Explain),
    UNLEASE: _decode_unlease,
    LEASED: _decode_leased,
    RESULT: _decode_result,
    FREED: _pair_decoder(FREED, Freed),
    GOT: _decode_got,
    VERIFIED: _pair_decoder(VERIFIED, Verified),
}
"""Decoder of each binary kind."""
