"""The bytes of messages between ranks: what local ranks gave, and what came from other machines.

A local rank's message stays where the rank wrote it and is read (or sent) from there. One from another
machine gets room in the arena when a receive asks for it, and its chunks are placed there as they come. One
that comes whole and unasked stays in the buffer it came in if it is small, else it is put there too. All
calls but ``digest`` belong to one thread; what others write between ``target`` and ``settled`` is not given
away.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from frogzmq.content.chunks import digest_chunk
from frogzmq.dataplane.opbuffers import Buffer, Bytes, as_bytes
from frogzmq.errors import StoreFull
from frogzmq.mailing import MailKey
from frogzmq.store.arena import Arena
from frogzmq.store.index import Extent
from frogzmq.types import Digest
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.mail import split_seq
from frogzmq.wire.messages import ChunkHeader

OWNER = "messages"
"""Name under which room for messages is leased."""


class Place(NamedTuple):
    """Where a message stands in the arena."""

    seg: int
    off: int


def key_of(header: ChunkHeader) -> MailKey:
    """The message that a chunk belongs to."""
    dst, n = split_seq(header.seq)
    return MailKey(header.gid, header.part, dst, n)


class MailBuffers:
    """Buffers of messages by their keys. ``arena``: None for a driver without one (the simulator)."""

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        self._bytes: dict[MailKey, Bytes] = {}
        self._extents: dict[MailKey, Extent] = {}
        self._steps: dict[MailKey, int] = {}
        """Of messages that are being placed chunk by chunk: bytes a chunk."""
        self._busy: dict[MailKey, int] = {}
        self._closing: set[MailKey] = set()

    def put(self, key: MailKey, buf: Buffer) -> None:
        """A local rank's message: an arena view (of which more may be written later), or bytes."""
        self._bytes[key] = as_bytes(buf)

    def open(self, key: MailKey, size: int, chunk_bytes: int) -> None:
        """Make room for a message of another machine. ``StoreFull`` where there is none."""
        if self._arena is None or size <= INLINE_BYTES:
            self._bytes[key] = np.empty(size, np.uint8)
        else:
            extent = self._extents[key] = self._arena.lease(OWNER, size)
            self._bytes[key] = self._arena.view(extent.seg, extent.off, size)
        self._steps[key] = chunk_bytes

    def target(self, header: ChunkHeader) -> Bytes | None:
        """Where a chunk of an opened message goes, for a thread to write; then ``settled`` must be called.

        None where the message is not open: it comes whole, see ``place``.
        """
        key = key_of(header)
        step = self._steps.get(key)
        if step is None:
            return None
        self._busy[key] = self._busy.get(key, 0) + 1
        start = header.index * step
        return self._bytes[key][start : start + header.size]

    def settled(self, header: ChunkHeader) -> None:
        """A thread has written what ``target`` gave it."""
        key = key_of(header)
        self._busy[key] -= 1
        if not self._busy[key]:
            del self._busy[key]
            if key in self._closing:
                self._closing.discard(key)
                self.close(key)

    def place(self, header: ChunkHeader, buf: Buffer) -> None:
        """Take a verified chunk; a message that nobody opened comes whole."""
        target = self.target(header)
        if target is not None:
            np.copyto(target, as_bytes(buf))
            self.settled(header)
            return
        key, data = key_of(header), as_bytes(buf)
        if self._arena is not None and header.size > INLINE_BYTES:
            with suppress(StoreFull):  # it then waits here for room, until it is read
                data = self._to_arena(key, data)
        self._bytes[key] = data

    def _to_arena(self, key: MailKey, data: Bytes) -> Bytes:
        assert self._arena is not None
        extent = self._arena.lease(OWNER, len(data))
        self._extents[key] = extent
        view = self._arena.view(extent.seg, extent.off, len(data))
        np.copyto(view, data)
        return view

    def digest(self, key: MailKey, start: int, stop: int) -> Digest | None:
        """Hash a piece of a message; None where the message is closed. Any thread."""
        whole = self._bytes.get(key)
        return None if whole is None else digest_chunk(whole[start:stop])

    def payload(self, header: ChunkHeader, chunk_bytes: int) -> Bytes:
        """The bytes of a chunk to send, not copied. ``LookupError``: the message is closed."""
        whole = self._bytes[key_of(header)]
        start = header.index * chunk_bytes
        return whole[start : start + header.size]

    def whole(self, key: MailKey) -> Bytes:
        """All bytes of a message. ``LookupError``: it is closed."""
        return self._bytes[key]

    def where(self, key: MailKey) -> Place:
        """Where a large message stands in the arena. ``StoreFull``: there is no room to put it there."""
        assert self._arena is not None, "ranks read from an arena"
        extent = self._extents.get(key)
        if extent is None:
            place = self._arena.locate(self._bytes[key])
            if place is not None:
                return Place(*place)
            self._bytes[key] = self._to_arena(key, self._bytes[key])
            extent = self._extents[key]
        return Place(extent.seg, extent.off)

    def close(self, key: MailKey) -> None:
        """Forget a message; its room goes when no thread writes there any more."""
        if key in self._busy:
            self._closing.add(key)
            return
        self._bytes.pop(key, None)
        self._steps.pop(key, None)
        extent = self._extents.pop(key, None)
        if extent is not None and self._arena is not None:
            self._arena.release(extent)

    def usage(self) -> dict[str, int]:
        """Messages whose bytes are here, and bytes of those that came from other machines."""
        return {"messages": len(self._bytes), "room_bytes": sum(e.size for e in self._extents.values())}
