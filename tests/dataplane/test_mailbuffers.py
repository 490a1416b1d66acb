"""Where the bytes of messages stand, and that no thread writes where they no longer do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frogzmq.content.chunks import digest_chunk
from frogzmq.dataplane.mailbuffers import OWNER, MailBuffers, key_of
from frogzmq.errors import StoreFull
from frogzmq.mailing import MailKey
from frogzmq.store.arena import Arena
from frogzmq.types import Digest, GroupId, Role
from frogzmq.wire.mail import address, mail_seq
from frogzmq.wire.messages import ChunkHeader

KEY = MailKey(GroupId(bytes(16)), 3, 1, 7)
STEP = 64 << 10


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "a", max_bytes=1 << 20, fallback=tmp_path / "a", warn=print)
    yield arena
    arena.close()


def chunk(index: int, data: np.ndarray) -> ChunkHeader:
    seq, where = mail_seq(KEY.dst, KEY.n), address(0, "uint8")
    return ChunkHeader(KEY.gid, seq, Role.MAIL, KEY.src, index, len(data), Digest(bytes(32)), where, 0)


def test_a_header_names_its_message() -> None:
    assert key_of(chunk(5, np.zeros(1, np.uint8))) == KEY


def test_chunks_are_put_where_the_rank_reads(arena: Arena) -> None:
    buffers, data = MailBuffers(arena), np.arange(150_000).astype(np.uint8)
    buffers.open(KEY, len(data), STEP)
    for index in (2, 0, 1):
        part = data[index * STEP : (index + 1) * STEP]
        buffers.place(chunk(index, part), part)
    place = buffers.where(KEY)
    assert (arena.view(place.seg, place.off, len(data), OWNER) == data).all()
    assert buffers.usage()["room_bytes"] >= len(data)
    buffers.close(KEY)
    assert buffers.usage() == {"messages": 0, "room_bytes": 0}
    assert arena.usage()["leased_bytes"] == 0


@pytest.mark.parametrize("size", [0, 10, 32 << 10, (32 << 10) + 1])
def test_a_message_that_comes_whole(arena: Arena, size: int) -> None:
    buffers, data = MailBuffers(arena), np.arange(size).astype(np.uint8)
    buffers.place(chunk(0, data), data)
    assert (buffers.whole(KEY) == data).all()
    assert (arena.usage()["leased_bytes"] != 0) == (size > 32 << 10), "large ones stand where ranks read"
    buffers.close(KEY)
    assert arena.usage()["leased_bytes"] == 0


def test_a_message_that_comes_whole_waits_for_room(arena: Arena) -> None:
    buffers, data = MailBuffers(arena), np.ones(300_000, np.uint8)
    full = arena.lease("others", 800_000)
    buffers.place(chunk(0, data), data)
    assert (buffers.whole(KEY) == 1).all()
    with pytest.raises(StoreFull):
        buffers.where(KEY)
    arena.release(full)
    place = buffers.where(KEY)
    assert (arena.view(place.seg, place.off, len(data), OWNER) == 1).all()


def test_room_stays_while_a_thread_writes_there(arena: Arena) -> None:
    buffers, part = MailBuffers(arena), np.ones(STEP, np.uint8)
    buffers.open(KEY, 2 * STEP, STEP)
    first, second = buffers.target(chunk(0, part)), buffers.target(chunk(1, part))
    assert first is not None
    assert second is not None
    buffers.close(KEY)
    first[:] = part
    buffers.settled(chunk(0, part))
    assert arena.usage()["leased_bytes"] != 0
    second[:] = part
    buffers.settled(chunk(1, part))
    assert arena.usage()["leased_bytes"] == 0
    assert buffers.target(chunk(0, part)) is None


def test_a_rank_s_message_is_read_from_where_it_stands(arena: Arena) -> None:
    buffers, lease = MailBuffers(arena), arena.lease("rank", 100_000)
    view = arena.view(lease.seg, lease.off, 100_000)
    buffers.put(KEY, view)
    view[:] = 9
    assert buffers.where(KEY) == (lease.seg, lease.off)
    assert buffers.digest(KEY, STEP, 100_000) == digest_chunk(view[STEP:])
    sent = buffers.payload(chunk(1, view[STEP:]), STEP)
    assert np.shares_memory(sent, view)
    assert len(sent) == 100_000 - STEP
    buffers.close(KEY)
    assert buffers.digest(KEY, 0, 1) is None
    assert arena.usage()["leased_bytes"] != 0, "it is the rank's to give back"
