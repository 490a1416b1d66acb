"""Rank <-> peer: datagrams of the machine-local socket to values, and back.

A datagram is one kind byte and either a fixed little-endian struct with, for two kinds, bytes behind it
(``rank_binary``: the hot path), or a "more follows" byte and a piece of JSON (``rank_json``). Senders put
all pieces of one JSON message on the socket under one lock; binary datagrams may come in between. An
``Assembler`` per connection puts pieces together again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from frogzmq.errors import WireError
from frogzmq.wire import limits, rank_binary, rank_json, rank_mail
from frogzmq.wire.frames import parse_json
from frogzmq.wire.rank_binary import (
    FINAL,
    INLINE,
    NODATA,
    Binary,
    Buffer,
    Consumed,
    Explain,
    Freed,
    Got,
    Lease,
    Leased,
    Post,
    Ready,
    Result,
    Unlease,
    Verified,
    encode_consumed,
    encode_explain,
    encode_freed,
    encode_got,
    encode_lease,
    encode_leased,
    encode_post,
    encode_ready,
    encode_result,
    encode_unlease,
    encode_verified,
)
from frogzmq.wire.rank_json import (
    Bye,
    Error,
    Explained,
    Failed,
    Hello,
    Join,
    Joined,
    Leave,
    Note,
    Peek,
    Peeked,
    Stop,
    Welcome,
)
from frogzmq.wire.rank_json import Json as RareJson
from frogzmq.wire.rank_mail import (
    ANY,
    Arrived,
    BinaryMail,
    Mail,
    MailAsked,
    MailBytes,
    MailDone,
    MailFailed,
    MailRead,
    MailTaken,
    Receive,
    encode_arrived,
    encode_mail,
    encode_mail_asked,
    encode_mail_bytes,
    encode_mail_done,
    encode_mail_read,
    encode_mail_taken,
    encode_receive,
)

__all__ = [
    "ANY", "BINARY", "FINAL", "FROM_PEER", "FROM_RANK", "INLINE", "JSON", "NODATA", "Arrived", "Assembler",
    "Buffer", "Bye", "Consumed", "Datagram", "Error", "Explain", "Explained", "Failed", "Freed", "Got",
    "Hello", "Join", "Joined", "Json", "Lease", "Leased", "Leave", "Mail", "MailAsked", "MailBytes",
    "MailDone", "MailFailed", "MailRead", "MailTaken", "Note", "Peek", "Peeked", "Post", "Ready", "Receive",
    "Result", "Stop", "Unlease", "Verified", "Welcome", "decode", "encode_arrived", "encode_consumed",
    "encode_explain", "encode_freed", "encode_got", "encode_json", "encode_lease", "encode_leased",
    "encode_mail", "encode_mail_asked", "encode_mail_bytes", "encode_mail_done", "encode_mail_read",
    "encode_mail_taken", "encode_post", "encode_ready", "encode_receive", "encode_result", "encode_unlease",
    "encode_verified",
]  # fmt: skip

Json: TypeAlias = RareJson | MailFailed
Datagram: TypeAlias = Binary | BinaryMail | Json
JSON: tuple[type[Json], ...] = (*rank_json.JSON, MailFailed)
"""Every JSON datagram."""
BINARY = (*rank_binary.BINARY, *rank_mail.BINARY)
"""Every binary datagram: kind, type, ``struct`` codes."""
STRUCTS = rank_binary.STRUCTS | rank_mail.STRUCTS
DECODERS: dict[int, Callable[[Buffer], Binary | BinaryMail]] = {**rank_binary.DECODERS, **rank_mail.DECODERS}

_MODELS = {cls.KIND: cls for cls in JSON}
FROM_RANK = frozenset(kind for kind in (*STRUCTS, *_MODELS) if kind < 64)
"""Kinds that a rank may send."""
FROM_PEER = frozenset(kind for kind in (*STRUCTS, *_MODELS) if kind >= 64)
"""Kinds that the peer may send."""


def encode_json(message: Json) -> list[bytes]:
    """Return the datagrams of a JSON message, to be sent one after the other.

    ``WireError`` where it is longer than ``limits.JSON_BYTES`` or holds text that UTF-8 cannot carry.
    """
    name, step = type(message).__name__, limits.JSON_PIECE_BYTES
    try:
        body: bytes = message.__pydantic_serializer__.to_json(message)
    except PydanticSerializationError as error:
        raise WireError(f"{name} cannot be written as JSON: {error}") from None
    if len(body) > limits.JSON_BYTES:
        raise WireError(f"{name} of {len(body)} bytes, limit {limits.JSON_BYTES}")
    last = max(0, len(body) - 1) // step * step
    return [bytes((message.KIND, at < last)) + body[at : at + step] for at in range(0, last + 1, step)]


def decode(datagram: Buffer) -> Datagram:
    """Parse one whole datagram; payloads are views of it, not copies.

    ``WireError`` for anything that is not exactly one valid message (``VersionMismatch`` where a Hello or
    Welcome carries another version), also for one piece of a longer JSON message: see ``Assembler``.
    """
    if not 1 <= len(datagram) <= limits.DATAGRAM_BYTES:
        raise WireError(f"datagram of {len(datagram)} bytes, allowed are 1 to {limits.DATAGRAM_BYTES}")
    kind = datagram[0]
    binary = DECODERS.get(kind)
    if binary is not None:
        try:
            return binary(datagram)
        except struct.error:
            size = STRUCTS[kind].size
            raise WireError(f"datagram of kind {kind} has {len(datagram)} bytes, its struct {size}") from None
    body, more = _piece(datagram)
    if more:
        raise WireError(f"datagram of kind {kind} is a piece of a longer message")
    return _parse(kind, body)


class Assembler:
    """Decodes the datagrams of one connection in order, and holds the pieces of a split JSON message.

    ``accept`` are the kinds that the other end may send. After a ``WireError`` the pieces are dropped.
    """

    def __init__(self, accept: frozenset[int] = FROM_RANK | FROM_PEER) -> None:
        self._accept = accept
        self._kind = 0
        self._body = bytearray()

    def feed(self, datagram: Buffer) -> Datagram | None:
        """Return the message that this datagram is or completes, or None while pieces are missing."""
        kind = datagram[0] if datagram else 0
        if kind not in self._accept:
            self._drop()
            raise WireError(f"datagram of {len(datagram)} bytes with unexpected kind {kind}")
        if kind in DECODERS:
            return decode(datagram)
        try:
            return self._gather(kind, datagram)
        except WireError:
            self._drop()
            raise

    def _gather(self, kind: int, datagram: Buffer) -> Json | None:
        body, more = _piece(datagram)
        if self._kind not in (0, kind):
            raise WireError(f"JSON of kind {kind} in the middle of one of kind {self._kind}")
        if len(self._body) + len(body) > limits.JSON_BYTES:
            raise WireError(f"JSON of kind {kind} is longer than {limits.JSON_BYTES} bytes")
        if not more and not self._kind:
            return _parse(kind, body)
        self._kind = kind
        self._body += body
        if more:
            return None
        whole = bytes(self._body)
        self._drop()
        return _parse(kind, whole)

    def _drop(self) -> None:
        self._kind = 0
        self._body = bytearray()


def _piece(datagram: Buffer) -> tuple[bytes, bool]:
    kind, size = datagram[0], len(datagram) - 2
    if kind not in _MODELS:
        raise WireError(f"unknown datagram kind {kind}")
    if size < 0 or size > limits.JSON_PIECE_BYTES or datagram[1] > 1:
        raise WireError(f"JSON datagram of kind {kind} is malformed ({len(datagram)} bytes)")
    return bytes(datagram[2:]), datagram[1] == 1


def _parse(kind: int, body: bytes) -> Json:
    return cast(Json, parse_json(cast("type[BaseModel]", _MODELS[kind]), body))
