"""Peer <-> peer: ZeroMQ frames to messages and chunks, and back.

Frame 1 begins with a head of four bytes that no version changes: ``FZ``, protocol version, kind. A
control message is one frame: head and compact JSON. A chunk is two: head and a fixed little-endian
header (``CHUNK_LAYOUT``), then the payload as it is.

The digest of a chunk is not checked here: whoever takes the payload does that (``content.chunks``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from pydantic import BaseModel, ValidationError

from frogzmq.errors import VersionMismatch, WireError
from frogzmq.types import Role
from frogzmq.wire import limits
from frogzmq.wire.messages import CHUNK_KIND, CONTROL, PROTOCOL, ChunkHeader, Message

MAGIC = b"FZ"
Buffer: TypeAlias = bytes | memoryview

CHUNK_LAYOUT: tuple[tuple[str, str], ...] = (
    ("magic", "2s"), ("version", "B"), ("kind", "B"), ("gid", "16s"), ("seq", "Q"), ("role", "B"),
    ("reserved", "B"), ("part", "H"), ("index", "I"), ("size", "I"), ("done", "Q"),
    ("descriptor", "8s"), ("digest", "32s"),
)  # fmt: skip
"""Field names and ``struct`` codes of a chunk's first frame; ``reserved`` is 0."""
_CHUNK = struct.Struct("<" + "".join(code for _, code in CHUNK_LAYOUT))
CHUNK_HEADER_BYTES = _CHUNK.size

_HEADS: dict[int, bytes] = {cls.KIND: MAGIC + bytes((PROTOCOL, cls.KIND)) for cls in CONTROL}
_MODELS: dict[int, type[BaseModel]] = {cls.KIND: cls for cls in CONTROL}
_ROLES = (Role.PART, Role.RESULT, Role.MAIL)
_SEQ_END = 1 << 63
_new = tuple.__new__  # the named tuples' own constructor costs as much as the rest of the decoder


class ChunkFrame(NamedTuple):
    """A chunk as it came in: ``payload`` is ``header.size`` bytes, not yet checked against the digest."""

    header: ChunkHeader
    payload: Buffer


def encode(message: Message) -> bytes:
    """Return the one frame of a control message."""
    frame = _HEADS[message.KIND] + message.__pydantic_serializer__.to_json(message)
    assert len(frame) <= limits.CONTROL_BYTES, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def encode_chunk(header: ChunkHeader) -> bytes:
    """Return frame 1 of a chunk; frame 2 is the payload itself, ``header.size`` bytes."""
    gid, seq, role, part, index, size, digest, descriptor, done = header
    assert (len(gid), len(descriptor), len(digest)) == (16, 8, 32), "ids of a chunk have fixed lengths"
    assert size <= limits.CHUNK_BYTES, f"chunk of {size} bytes"
    return _CHUNK.pack(
        MAGIC, PROTOCOL, CHUNK_KIND, gid, seq, role, 0, part, index, size, done, descriptor, digest
    )


def decode(frames: Sequence[Buffer]) -> Message | ChunkFrame:
    """Parse the frames of one message.

    Raises ``VersionMismatch`` where the head carries another protocol version, ``WireError`` for
    anything else that is not exactly one valid message.
    """
    count = len(frames)
    if not 1 <= count <= limits.FRAMES:
        raise WireError(f"message of {count} frames, allowed are 1 to {limits.FRAMES}")
    head = bytes(frames[0][: limits.HEAD_BYTES])
    if len(head) < limits.HEAD_BYTES or not head.startswith(MAGIC):
        raise WireError(f"frame does not begin with {MAGIC!r}: not a frogzmq message")
    version, kind = head[2], head[3]
    if version != PROTOCOL:
        raise VersionMismatch(PROTOCOL, version)
    if kind == CHUNK_KIND:
        return _decode_chunk(frames)
    model = _MODELS.get(kind)
    if model is None:
        raise WireError(f"unknown message kind {kind}")
    if count != 1:
        raise WireError(f"{model.__name__} in {count} frames, expected 1")
    size = len(frames[0])
    if size > limits.CONTROL_BYTES:
        raise WireError(f"{model.__name__} of {size} bytes, limit {limits.CONTROL_BYTES}")
    return cast(Message, parse_json(model, bytes(frames[0][limits.HEAD_BYTES :])))


def _decode_chunk(frames: Sequence[Buffer]) -> ChunkFrame:
    if len(frames) != 2:
        raise WireError(f"chunk in {len(frames)} frame, expected 2")
    head, payload = frames
    if len(head) != CHUNK_HEADER_BYTES:
        raise WireError(f"chunk header of {len(head)} bytes, expected {CHUNK_HEADER_BYTES}")
    (_, _, _, gid, seq, role, reserved, part, index, size, done, descriptor, digest) = _CHUNK.unpack(head)
    if size != len(payload) or size > limits.CHUNK_BYTES:
        raise WireError(
            f"chunk says {size} bytes and has {len(payload)}; both must agree, limit {limits.CHUNK_BYTES}"
        )
    if role > 2 or reserved:
        raise WireError(f"chunk with role {role} and reserved byte {reserved}: role is 0 to 2, reserved 0")
    if seq >= _SEQ_END or done >= _SEQ_END:
        raise WireError(f"chunk with op number {max(seq, done)}, which is beyond 63 bits")
    fields = (gid, seq, _ROLES[role], part, index, size, digest, descriptor, done)
    return _new(ChunkFrame, (_new(ChunkHeader, fields), payload))


def parse_json(model: type[BaseModel], body: bytes) -> BaseModel:
    """Validate JSON against ``model``; ``WireError`` names the model and the first field that is wrong."""
    try:
        return model.__pydantic_validator__.validate_json(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise WireError(_explain(model.__name__, error)) from None


def _explain(what: str, error: ValidationError) -> str:
    count = error.error_count()
    if count > 64:  # a sender of garbage does not get us to format all of it
        return f"{what} has {count} wrong fields"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return limits.clip(f"{what} is malformed at {where or 'the top'}: {first['msg']}", 300)
