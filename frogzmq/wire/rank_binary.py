"""The binary datagrams between a rank and its peer: named tuples, their layout, ``encode_*`` and decoders.

Users import ``frogzmq.wire.ranks``, which re-exports what is public here. ``encode_*`` trusts its caller
and packs; the decoders trust nobody and raise ``WireError`` (or ``struct.error`` where bytes are missing,
which ``ranks.decode`` turns into one).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from frogzmq.errors import WireError
from frogzmq.wire import limits

Buffer: TypeAlias = bytes | bytearray | memoryview

INLINE = 1
"""Flag of Post and Result: the bytes follow in the datagram, all of them."""
NODATA = 2
"""Flag of Post: the rank calls the op and gives no bytes. Of Result: the rank gets none."""
FINAL = 4
"""Flag of Result: it is complete."""

LEASE, POST, READY, CONSUMED, EXPLAIN, UNLEASE = 3, 4, 5, 6, 8, 12
LEASED, RESULT, FREED = 66, 67, 69
_SEQ_END = 1 << 63


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


Binary: TypeAlias = Lease | Post | Ready | Consumed | Explain | Unlease | Leased | Result | Freed

BINARY: tuple[tuple[int, type[Binary], str], ...] = (
    (LEASE, Lease, "IQ"), (POST, Post, "IQBHQQQH"), (READY, Ready, "IQQ"), (CONSUMED, Consumed, "IQ"),
    (EXPLAIN, Explain, "IQ"), (UNLEASE, Unlease, "HQ"), (LEASED, Leased, "IHQQ"), (RESULT, Result, "IQBHQQQ"),
    (FREED, Freed, "IQ"),
)  # fmt: skip
"""Kind, type, and ``struct`` codes of what follows the kind byte. Post's last code is the length of its
descriptor, which follows the struct; an inline payload follows that."""
STRUCTS = {kind: struct.Struct("<B" + codes) for kind, _, codes in BINARY}

_lease, _post, _ready = STRUCTS[LEASE], STRUCTS[POST], STRUCTS[READY]
_consumed, _explain, _unlease = STRUCTS[CONSUMED], STRUCTS[EXPLAIN], STRUCTS[UNLEASE]
_leased, _result, _freed = STRUCTS[LEASED], STRUCTS[RESULT], STRUCTS[FREED]
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


# -------------------------------------------------------------------- decode
def _whole(datagram: Buffer, layout: struct.Struct, what: str) -> None:
    if len(datagram) != layout.size:
        raise WireError(f"{what} of {len(datagram)} bytes, expected {layout.size}")


def _seq_error(what: str, seq: int) -> WireError:
    return WireError(f"{what} with op number {seq}: op numbers start at 1 and stay below 2**63")


def _extent(what: str, off: int, size: int) -> None:
    if not off < _SEQ_END or not size <= limits.TENSOR_BYTES:
        raise WireError(f"{what} names {size} bytes at {off}; the limit is {limits.TENSOR_BYTES} bytes")


def _decode_lease(datagram: Buffer) -> Lease:
    _whole(datagram, _lease, "Lease")
    _, req, size = _lease.unpack(datagram)
    _extent("Lease", 0, size)
    return Lease(req, size)


def _decode_post(datagram: Buffer) -> Post:
    _, handle, seq, flags, seg, off, nbytes, ready, length = _post.unpack_from(datagram)
    if not 0 < seq < _SEQ_END:
        raise _seq_error("Post", seq)
    end = POST_BYTES + length
    rest = len(datagram) - end
    if length > limits.DESCRIPTOR_BYTES or rest < 0:
        raise WireError(f"Post with a descriptor of {length} bytes in a datagram of {len(datagram)}")
    descriptor = bytes(datagram[POST_BYTES:end])
    _extent("Post", off, nbytes)
    if ready > nbytes:
        raise WireError(f"Post says {ready} of {nbytes} bytes are ready")
    if flags == INLINE:
        if not rest == nbytes == ready <= limits.INLINE_BYTES:
            raise WireError(
                f"inline Post says {ready} of {nbytes} bytes and has {rest}; limit {limits.INLINE_BYTES}"
            )
        return Post(handle, seq, flags, seg, off, nbytes, ready, descriptor, memoryview(datagram)[end:])
    if rest or flags not in (0, NODATA):
        raise WireError(f"Post with flags {flags} and {rest} bytes behind its descriptor")
    return Post(handle, seq, flags, seg, off, nbytes, ready, descriptor)


def _decode_ready(datagram: Buffer) -> Ready:
    _whole(datagram, _ready, "Ready")
    _, handle, seq, ready = _ready.unpack(datagram)
    if not 0 < seq < _SEQ_END:
        raise _seq_error("Ready", seq)
    _extent("Ready", 0, ready)
    return Ready(handle, seq, ready)


def _decode_pair(
    what: str, layout: struct.Struct, make: Callable[[int, int], Binary]
) -> Callable[[Buffer], Binary]:
    """Build the decoder of a kind that is (handle, seq) and nothing else."""

    def decode_it(datagram: Buffer) -> Binary:
        _whole(datagram, layout, what)
        _, handle, seq = layout.unpack(datagram)
        if not 0 < seq < _SEQ_END:
            raise _seq_error(what, seq)
        return make(handle, seq)

    return decode_it


def _decode_unlease(datagram: Buffer) -> Unlease:
    _whole(datagram, _unlease, "Unlease")
    _, seg, off = _unlease.unpack(datagram)
    _extent("Unlease", off, 0)
    return Unlease(seg, off)


def _decode_leased(datagram: Buffer) -> Leased:
    _whole(datagram, _leased, "Leased")
    _, req, seg, off, size = _leased.unpack(datagram)
    _extent("Leased", off, size)
    return Leased(req, seg, off, size)


def _decode_result(datagram: Buffer) -> Result:
    _, handle, seq, flags, seg, off, ready, total = _result.unpack_from(datagram)
    rest = len(datagram) - RESULT_BYTES
    if not 0 < seq < _SEQ_END:
        raise _seq_error("Result", seq)
    _extent("Result", off, total)
    if ready > total:
        raise WireError(f"Result says {ready} of {total} bytes are ready")
    if flags == INLINE | FINAL:
        if not rest == total == ready <= limits.INLINE_BYTES:
            raise WireError(
                f"inline Result says {ready} of {total} bytes and has {rest}; limit {limits.INLINE_BYTES}"
            )
        return Result(handle, seq, flags, seg, off, ready, total, memoryview(datagram)[RESULT_BYTES:])
    if rest or flags not in (0, FINAL, NODATA | FINAL) or (flags == FINAL and ready != total):
        raise WireError(f"Result with flags {flags}, {ready} of {total} bytes ready, {rest} bytes behind it")
    return Result(handle, seq, flags, seg, off, ready, total)


DECODERS: dict[int, Callable[[Buffer], Binary]] = {
    LEASE: _decode_lease,
    POST: _decode_post,
    READY: _decode_ready,
    CONSUMED: _decode_pair("Consumed", _consumed, Consumed),
    EXPLAIN: _decode_pair("Explain", _explain, Explain),
    UNLEASE: _decode_unlease,
    LEASED: _decode_leased,
    RESULT: _decode_result,
    FREED: _decode_pair("Freed", _freed, Freed),
}
"""Decoder of each binary kind."""
