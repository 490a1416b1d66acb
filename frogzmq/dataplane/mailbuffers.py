"""The bytes of messages between ranks: what local ranks gave, and what came from other machines.

A local rank's message stays where the rank wrote it and is read (or sent) from there. One from another
machine gets room in the arena when a receive asks for it, and its chunks are placed there as they come; small
ones come whole and stay in the buffer they came in. All calls but ``digest`` belong to one thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from frogzmq.content.chunks import digest_chunk
from frogzmq.dataplane.opbuffers import Buffer, Bytes, as_bytes
from frogzmq.errors import WireError
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

    def place(self, header: ChunkHeader, buf: Buffer) -> None:
        """Take a verified chunk; a message that nobody opened comes whole. ``WireError``: it does not fit."""
        key, data = key_of(header), as_bytes(buf)
        step = self._steps.get(key)
        if step is None:
            self._bytes[key] = data
            return
        start = header.index * step
        whole = self._bytes[key]
        if start + len(data) > len(whole):
            raise WireError(f"chunk {header.index} of a message of {len(whole)} bytes goes beyond its end")
        np.copyto(whole[start : start + len(data)], data)

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
        """Where a large message stands in the arena. ``LookupError``: it is closed, or not there."""
        extent = self._extents.get(key)
        if extent is not None:
            return Place(extent.seg, extent.off)
        place = self._arena.locate(self._bytes[key]) if self._arena is not None else None
        if place is None:
            raise LookupError(f"message {key.n} from rank {key.src} does not stand in the arena")
        return Place(*place)

    def close(self, key: MailKey) -> None:
        """Forget a message."""
        self._bytes.pop(key, None)
        self._steps.pop(key, None)
        extent = self._extents.pop(key, None)
        if extent is not None and self._arena is not None:
            self._arena.release(extent)

    def usage(self) -> dict[str, int]:
        """Messages whose bytes are here, and bytes of those that came from other machines."""
        return {"messages": len(self._bytes), "room_bytes": sum(e.size for e in self._extents.values())}
