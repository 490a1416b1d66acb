"""Golden vectors: the bytes on the wire do not change by accident."""

from __future__ import annotations

import pytest
from support.wire_samples import CHUNK, CONTROLS, PAYLOAD, RANKS, VECTORS, encode_datagrams, vectors

from frogzmq.wire import frames, messages, ranks

HINT = "the wire format changed; if on purpose: raise PROTOCOL and run tools/wirevectors.py"


def name_of(message: object) -> str:
    return type(message).__name__


def test_there_is_one_vector_per_kind() -> None:
    assert {type(message) for message in CONTROLS} == set(messages.CONTROL)
    assert {type(message) for message in RANKS} == {*ranks.JSON, *(row[1] for row in ranks.BINARY)}
    assert {path.name for path in VECTORS.iterdir()} == set(vectors())


@pytest.mark.parametrize("message", CONTROLS, ids=name_of)
def test_control(message: messages.Message) -> None:
    stored = (VECTORS / f"peer-{name_of(message)}.bin").read_bytes()
    assert frames.encode(message) == stored, HINT
    assert frames.decode([stored]) == message


def test_chunk() -> None:
    stored = (VECTORS / "peer-chunk.bin").read_bytes()
    head, payload = stored[: frames.CHUNK_HEADER_BYTES], stored[frames.CHUNK_HEADER_BYTES :]
    assert frames.encode_chunk(CHUNK) == head, HINT
    assert frames.decode([head, payload]) == frames.ChunkFrame(CHUNK, PAYLOAD)


@pytest.mark.parametrize("message", RANKS, ids=name_of)
def test_datagram(message: ranks.Datagram) -> None:
    stored = (VECTORS / f"rank-{name_of(message)}.bin").read_bytes()
    assert encode_datagrams(message) == [stored], HINT
    decoded = ranks.decode(stored)
    assert decoded == message
    assert type(decoded) is type(message)


def test_kind_numbers_are_unique() -> None:
    peer = [cls.KIND for cls in messages.CONTROL] + [messages.CHUNK_KIND]
    local = [cls.KIND for cls in ranks.JSON] + [row[0] for row in ranks.BINARY]
    assert len(set(peer)) == len(peer)
    assert len(set(local)) == len(local)
    assert set(local) == ranks.FROM_RANK | ranks.FROM_PEER
