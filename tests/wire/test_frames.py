"""Peer-to-peer frames: round trips, every refusal by name, and bounds before work."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from support import wire_strategies as ws
from support.wire_samples import CHUNK, CONTROLS, DIGEST, GID, PAYLOAD, WHO

from frogzmq.errors import VersionMismatch, WireError
from frogzmq.wire import frames, limits, messages
from frogzmq.wire.messages import CHUNK_KIND, PROTOCOL, ChunkHeader

HEAD = frames.encode_chunk(CHUNK)
OFFSETS = {
    name: struct.calcsize("<" + "".join(code for _, code in frames.CHUNK_LAYOUT[:i]))
    for i, (name, _) in enumerate(frames.CHUNK_LAYOUT)
}


def patched(name: str, value: int) -> bytes:
    """Return the sample chunk header with one integer field overwritten."""
    head = bytearray(HEAD)
    struct.pack_into("<" + dict(frames.CHUNK_LAYOUT)[name], head, OFFSETS[name], value)
    return bytes(head)


@given(ws.CONTROLS)
def test_control_round_trip(message: messages.Message) -> None:
    frame = frames.encode(message)
    assert frame[:4] == b"FZ" + bytes((PROTOCOL, message.KIND))
    for given_frame in (frame, memoryview(frame)):
        decoded = frames.decode([given_frame])
        assert decoded == message
        assert type(decoded) is type(message)


@given(ws.chunks())
def test_chunk_round_trip(chunk: tuple[ChunkHeader, bytes]) -> None:
    header, payload = chunk
    head = frames.encode_chunk(header)
    assert frames.decode([head, payload]) == frames.ChunkFrame(header, payload)
    view = memoryview(payload)
    decoded = frames.decode([memoryview(head), view])
    assert isinstance(decoded, frames.ChunkFrame)
    assert decoded.header == header
    assert decoded.payload is view, "the payload is handed on, not copied"


@pytest.mark.parametrize("kind", [*(cls.KIND for cls in messages.CONTROL), CHUNK_KIND, 200])
@pytest.mark.parametrize("version", [0, PROTOCOL + 1, 255])
def test_other_versions_are_named_whatever_follows(kind: int, version: int) -> None:
    with pytest.raises(VersionMismatch) as caught:
        frames.decode([b"FZ" + bytes((version, kind)) + b"a layout of tomorrow"])
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL, version)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([], "0 frames"),
        ([b"x"] * 3, "3 frames"),
        ([b""], "does not begin with"),
        ([b"FZ" + bytes([PROTOCOL])], "does not begin with"),
        ([b"GET / HTTP/1.1"], "does not begin with"),
        ([b"FZ" + bytes((PROTOCOL, 31)) + b"{}"], "unknown message kind 31"),
        ([frames.encode(CONTROLS[3]), b""], "Ping in 2 frames"),
        ([HEAD], "chunk in 1 frame"),
        ([HEAD[:-1], PAYLOAD], "chunk header of 87 bytes"),
        ([HEAD + b"x", PAYLOAD], "chunk header of 89 bytes"),
        ([HEAD, PAYLOAD[:-1]], "chunk says 32 bytes and has 31"),
        ([HEAD, PAYLOAD + b"x"], "chunk says 32 bytes and has 33"),
        ([patched("role", 3), PAYLOAD], "role 3"),
        ([patched("reserved", 1), PAYLOAD], "reserved byte 1"),
        ([patched("seq", 1 << 63), PAYLOAD], "63 bits"),
        ([patched("done", (1 << 64) - 1), PAYLOAD], "63 bits"),
        ([frames.encode(CONTROLS[3])[:-1]], "Ping is malformed"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":-1,"sent":0}'], "Ping is malformed at nonce"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":1,"sent":NaN}'], "Ping is malformed at sent"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":1,"sent":1e999}'], "Ping is malformed at sent"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":"1","sent":0}'], "Ping is malformed at nonce"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":1,"sent":0,"more":1}'], "Ping is malformed at more"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b"[" * 100_000], "Ping is malformed"),
        ([b"FZ" + bytes((PROTOCOL, 4)) + b'{"nonce":' + b"9" * 100_000 + b',"sent":0}'], "Ping is malformed"),
        ([b"FZ" + bytes((PROTOCOL, 6)) + b'{"reason":"\xff"}'], "Bye is malformed"),
    ],
)  # fmt: skip
def test_refusals(parts: list[bytes], complaint: str) -> None:
    with pytest.raises(WireError) as caught:
        frames.decode(parts)
    assert complaint in str(caught.value)
    assert not isinstance(caught.value, VersionMismatch)
    assert len(str(caught.value)) <= 320


def test_many_wrong_fields_are_counted_not_listed() -> None:
    body = "{" + ",".join(f'"x{i}":0' for i in range(10_000)) + "}"
    with pytest.raises(WireError, match=r"Ping has \d+ wrong fields"):
        frames.decode([b"FZ" + bytes((PROTOCOL, 4)) + body.encode()])


def longest(cls: type[messages.Control]) -> messages.Control:
    """Build the message of a kind whose JSON is as long as its model allows."""
    text, name, number = "\0" * limits.TEXT_CHARS, "\0" * limits.NAME_CHARS, -1.2345678901234567e-300
    endpoints = ["\0" * limits.ENDPOINT_CHARS] * limits.ENDPOINTS
    who = dict(WHO, endpoints=endpoints, pub_endpoints=endpoints, local_endpoint=endpoints[0])
    who |= dict.fromkeys(("instance", "name", "key", "netns", "python", "version"), name)
    u63, rank, u32 = (1 << 63) - 1, limits.RANKS - 1, (1 << 32) - 1
    values = {
        "who": messages.Identity(**who),
        "code": name,
        "text": text,
        "reason": text,
        "options": text,
        "gid": GID,
        "seq": u63,
        "nonce": u63,
        "upto": u63,
        "cost": u63,
        "last_seq": u63,
        "rank": rank,
        "part": rank,
        "sent": number,
        "settled": False,
        "ask": False,
        "results": False,
        "clean": False,
        "members": DIGEST,
        "root": DIGEST,
        "peer": WHO.peer,
        "ranks": [rank] * limits.MEMBERS,
        "parts": [rank] * limits.MEMBERS,
        "observed": [(rank, number)] * limits.MEMBERS,
        "items": [(1, rank, u32)] * limits.WANT_ITEMS,
        "rows": [(WHO.peer, number, number, number)] * limits.LINK_ROWS,
        "descriptor": '"' * limits.DESCRIPTOR_BYTES,
        "src": rank,
        "dst": rank,
        "n": u63,
        "tag": u32,
        "size": u63,
        "dtype": name,
        "known": u63,
        "answers": u63,
        "numbers": [u63] * limits.MAIL_ITEMS,
        "chunks": [u32] * limits.WANT_ITEMS,
        "mail": [(rank, u63)] * limits.MEMBERS,
        "given": [(rank, DIGEST)] * limits.RECEIPT_ROWS,
        "odd": [(rank, DIGEST)] * limits.RECEIPT_ROWS,
        "op": DIGEST,
        "held": DIGEST,
        "result": DIGEST,
    }
    return cls(**{field: values[field] for field in cls.model_fields})


@pytest.mark.parametrize("cls", messages.CONTROL, ids=lambda cls: cls.__name__)
def test_every_allowed_message_fits_the_frame_limit(cls: type[messages.Control]) -> None:
    message = longest(cls)
    frame = frames.encode(message)  # type: ignore[arg-type]
    assert len(frame) <= limits.CONTROL_BYTES
    assert frames.decode([frame]) == message


def test_an_oversized_control_message_is_refused_unparsed() -> None:
    frame = b"FZ" + bytes((PROTOCOL, 6)) + b" " * limits.CONTROL_BYTES
    with pytest.raises(WireError, match="limit 262144"):
        frames.decode([frame])


@pytest.mark.parametrize("size", [limits.CHUNK_BYTES, limits.CHUNK_BYTES + 1, (1 << 32) - 1])
def test_a_claimed_size_allocates_nothing(size: int) -> None:
    head = patched("size", size)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="both must agree"):
            frames.decode([head, PAYLOAD])
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_an_honest_chunk_above_the_limit_is_refused() -> None:
    size = limits.CHUNK_BYTES + 1
    with pytest.raises(WireError, match="limit 4194304"):
        frames.decode([patched("size", size), bytes(size)])
    assert frames.decode([patched("size", size - 1), bytes(size - 1)])


def test_encoding_nonsense_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="fixed lengths"):
        frames.encode_chunk(CHUNK._replace(digest=b"short"))
    with pytest.raises(AssertionError, match="chunk of"):
        frames.encode_chunk(CHUNK._replace(size=limits.CHUNK_BYTES + 1))
