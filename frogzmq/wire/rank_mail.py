"""The binary datagrams between a rank and its peer about messages to and from single ranks.

See ``rank_binary`` for how they are built. A message is named by its receiver and its number (from 1, for
each receiver), a receive by its number (from 1, for each rank).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from frogzmq.errors import WireError
from frogzmq.wire.limits import DTYPE_CHARS, INLINE_BYTES, MAIL_NUMBER, RANKS, TENSOR_BYTES
from frogzmq.wire.messages import U32, U63, Name
from frogzmq.wire.rank_binary import FINAL, INLINE, Buffer
from frogzmq.wire.rank_json import LongText, RankJson

MAIL, MAIL_BYTES, RECEIVE, MAIL_TAKEN, MAIL_READ = 20, 21, 22, 23, 24
ARRIVED, MAIL_ASKED, MAIL_DONE = 84, 85, 86
ANY = RANKS - 1
"""In place of the sending rank: from whomever."""
_OFF_END = 1 << 63
_DTYPE = f"{DTYPE_CHARS}s"


class Mail(NamedTuple):
    """A rank sends message ``n`` of ``size`` bytes to ``dst``. Its bytes are inline, or come by MailBytes."""

    handle: int
    n: int
    flags: int
    dst: int
    tag: int
    size: int
    dtype: str
    payload: Buffer = b""


class MailBytes(NamedTuple):
    """The first ``ready`` bytes of message ``n`` to ``dst`` are inline (all of them), or at (seg, off)."""

    handle: int
    n: int
    flags: int
    dst: int
    seg: int
    off: int
    ready: int
    payload: Buffer = b""


class Receive(NamedTuple):
    """A rank receives a message of ``size`` bytes with this tag from ``src`` (65535: from whomever)."""

    handle: int
    n: int
    src: int
    tag: int
    size: int
    dtype: str


class MailTaken(NamedTuple):
    """The rank has copied what it received as number ``n`` out of the arena."""

    handle: int
    n: int


class MailRead(NamedTuple):
    """The rank has read ``n`` inline messages in all."""

    handle: int
    n: int


class Arrived(NamedTuple):
    """The first ``ready`` of ``total`` bytes of receive ``n`` are inline, or at (``seg``, ``off``)."""

    handle: int
    n: int
    flags: int
    src: int
    seg: int
    off: int
    ready: int
    total: int
    payload: Buffer = b""


class MailAsked(NamedTuple):
    """A receive matches message ``n`` to ``dst``: its bytes are waited for."""

    handle: int
    n: int
    dst: int


class MailDone(NamedTuple):
    """The bytes of message ``n`` to ``dst`` are not needed any more."""

    handle: int
    n: int
    dst: int


class MailFailed(RankJson):
    """Message ``n`` to ``dst`` (-1: receive ``n``) never comes to an end; ``code`` names an error class."""

    KIND: ClassVar[int] = 87
    handle: U32
    n: U63
    dst: Annotated[int, Field(ge=-1, lt=RANKS)]
    code: Name
    text: LongText


BinaryMail: TypeAlias = Mail | MailBytes | Receive | MailTaken | MailRead | Arrived | MailAsked | MailDone

BINARY: tuple[tuple[int, type[BinaryMail], tuple[str, ...]], ...] = (
    (MAIL, Mail, ("I", "Q", "B", "H", "I", "Q", _DTYPE)),
    (MAIL_BYTES, MailBytes, ("I", "Q", "B", "H", "H", "Q", "Q")),
    (RECEIVE, Receive, ("I", "Q", "H", "I", "Q", _DTYPE)),
    (MAIL_TAKEN, MailTaken, ("I", "Q")),
    (MAIL_READ, MailRead, ("I", "Q")),
    (ARRIVED, Arrived, ("I", "Q", "B", "H", "H", "Q", "Q", "Q")),
    (MAIL_ASKED, MailAsked, ("I", "Q", "H")),
    (MAIL_DONE, MailDone, ("I", "Q", "H")),
)
"""Kind, type, and ``struct`` codes of what follows the kind byte; an inline payload follows that."""
STRUCTS = {kind: struct.Struct("<B" + "".join(codes)) for kind, _, codes in BINARY}
_BODIES = {kind: struct.Struct("<x" + "".join(codes)) for kind, _, codes in BINARY}
_new = tuple.__new__


# -------------------------------------------------------------------- encode
def encode_mail(
    handle: int, n: int, flags: int, dst: int, tag: int, size: int, dtype: str, payload: Buffer = b""
) -> bytes:
    """Pack a ``Mail``."""
    return b"".join((STRUCTS[MAIL].pack(MAIL, handle, n, flags, dst, tag, size, dtype.encode()), payload))


def encode_mail_bytes(
    handle: int, n: int, flags: int, dst: int, seg: int, off: int, ready: int, payload: Buffer = b""
) -> bytes:
    """Pack a ``MailBytes``."""
    return b"".join((STRUCTS[MAIL_BYTES].pack(MAIL_BYTES, handle, n, flags, dst, seg, off, ready), payload))


def encode_receive(handle: int, n: int, src: int, tag: int, size: int, dtype: str) -> bytes:
    """Pack a ``Receive``."""
    return STRUCTS[RECEIVE].pack(RECEIVE, handle, n, src, tag, size, dtype.encode())


def encode_mail_taken(handle: int, n: int) -> bytes:
    """Pack a ``MailTaken``."""
    return STRUCTS[MAIL_TAKEN].pack(MAIL_TAKEN, handle, n)


def encode_mail_read(handle: int, n: int) -> bytes:
    """Pack a ``MailRead``."""
    return STRUCTS[MAIL_READ].pack(MAIL_READ, handle, n)


def encode_arrived(
    handle: int, n: int, flags: int, src: int, seg: int, off: int, ready: int, total: int,
    payload: Buffer = b"",
) -> bytes:  # fmt: skip
    """Pack an ``Arrived``."""
    head = STRUCTS[ARRIVED].pack(ARRIVED, handle, n, flags, src, seg, off, ready, total)
    return b"".join((head, payload))


def encode_mail_asked(handle: int, n: int, dst: int) -> bytes:
    """Pack a ``MailAsked``."""
    return STRUCTS[MAIL_ASKED].pack(MAIL_ASKED, handle, n, dst)


def encode_mail_done(handle: int, n: int, dst: int) -> bytes:
    """Pack a ``MailDone``."""
    return STRUCTS[MAIL_DONE].pack(MAIL_DONE, handle, n, dst)


# -------------------------------------------------------------------- decode
def _check(what: str, n: int, *sizes: int) -> None:
    if not 0 < n < MAIL_NUMBER or any(size > TENSOR_BYTES for size in sizes):
        raise WireError(
            f"{what} {n} of {max(sizes, default=0)} bytes: numbers are 1 to 2**40 - 1, sizes at most "
            f"{TENSOR_BYTES}"
        )


def _text(raw: bytes) -> str:
    try:
        return raw.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise WireError(f"a message's dtype is called {raw!r}") from None


def _payload(what: str, datagram: Buffer, kind: int, flags: int, size: int) -> Buffer:
    start = STRUCTS[kind].size
    rest = len(datagram) - start
    if flags & INLINE:
        if not rest == size <= INLINE_BYTES:
            raise WireError(f"inline {what} says {size} bytes and has {rest}; limit {INLINE_BYTES}")
        return memoryview(datagram)[start:]
    if rest:
        raise WireError(f"{what} with flags {flags} and {rest} bytes behind it")
    return b""


def _decode_mail(datagram: Buffer) -> Mail:
    handle, n, flags, dst, tag, size, dtype = _BODIES[MAIL].unpack_from(datagram)
    _check("Mail", n, size)
    if flags not in (0, INLINE) or dst == ANY:
        raise WireError(f"Mail with flags {flags} to rank {dst}")
    payload = _payload("Mail", datagram, MAIL, flags, size)
    return _new(Mail, (handle, n, flags, dst, tag, size, _text(dtype), payload))


def _decode_mail_bytes(datagram: Buffer) -> MailBytes:
    fields = _BODIES[MAIL_BYTES].unpack_from(datagram)
    _, n, flags, _, _, off, ready = fields
    _check("MailBytes", n, ready)
    if flags not in (0, INLINE) or off >= _OFF_END:
        raise WireError(f"MailBytes with flags {flags} at {off}")
    return _new(MailBytes, (*fields, _payload("MailBytes", datagram, MAIL_BYTES, flags, ready)))


def _decode_receive(datagram: Buffer) -> Receive:
    handle, n, src, tag, size, dtype = _BODIES[RECEIVE].unpack(datagram)
    _check("Receive", n, size)
    return _new(Receive, (handle, n, src, tag, size, _text(dtype)))


def _decode_arrived(datagram: Buffer) -> Arrived:
    fields = _BODIES[ARRIVED].unpack_from(datagram)
    _, n, flags, _, _, off, ready, total = fields
    _check("Arrived", n, ready, total)
    good = flags in (0, FINAL, FINAL | INLINE) and ready <= total and (not flags or ready == total)
    if not good or off >= _OFF_END:
        raise WireError(f"Arrived with flags {flags}, {ready} of {total} bytes ready at {off}")
    return _new(Arrived, (*fields, _payload("Arrived", datagram, ARRIVED, flags, total)))


def _plain(kind: int, cls: type[BinaryMail]) -> Callable[[Buffer], BinaryMail]:
    """Build the decoder of a kind that is numbers and nothing else."""
    unpack = _BODIES[kind].unpack

    def decode_plain(datagram: Buffer) -> BinaryMail:
        fields = unpack(datagram)
        _check(cls.__name__, fields[1])
        return _new(cls, fields)

    return decode_plain


DECODERS: dict[int, Callable[[Buffer], BinaryMail]] = {
    MAIL: _decode_mail,
    MAIL_BYTES: _decode_mail_bytes,
    RECEIVE: _decode_receive,
    ARRIVED: _decode_arrived,
    MAIL_TAKEN: _plain(MAIL_TAKEN, MailTaken),
    MAIL_READ: _plain(MAIL_READ, MailRead),
    MAIL_ASKED: _plain(MAIL_ASKED, MailAsked),
    MAIL_DONE: _plain(MAIL_DONE, MailDone),
}
"""Decoder of each binary kind."""
