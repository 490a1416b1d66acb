"""The arena: shared memory that the peer owns, in files that local ranks map too.

Segments are sparse files of a fixed size. Bytes are handed out only after the file system has given them
(``posix_fallocate``), so that a full ``/dev/shm`` is a ``StoreFull`` here and never a bus error in whoever
writes. Segments stand in a directory on shared memory while there is room, else in a fallback directory on
disk, with one warning. Not thread-safe: one thread leases and releases; any thread may use the views.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frogzmq.errors import StoreFull, WireError
from frogzmq.store.index import Extent, Index, round_up
from frogzmq.store.map import Bytes
from frogzmq.store.place import NO_ROOM, PREFIX, Place, allocate, give_back

SEGMENT_BYTES = 4 << 30
"""Address space of a segment; costs nothing until used. Larger extents get a segment of their own size."""
IDLE_SHARE = 0.25
IDLE_FLOOR_BYTES = 64 << 20
"""Freed bytes kept for reuse: this share of ``max_bytes``, but no less than the floor. A page that is given
back costs about 0.3 us to get again, more than copying into it does."""


@dataclass(slots=True)
class _Segment:
    path: Path
    fd: int
    mapped: mmap.mmap
    whole: Bytes
    address: int
    size: int


class Arena:
    """Leases extents of shared memory to owners (rank connections, the peer itself).

    ``directory`` and ``fallback`` are for this arena alone: made (0700) when absent, cleared of segments
    that a dead peer left, removed at ``close``. ``max_bytes`` bounds all of it (None: no bound but the
    next); at each place at most 75 % of the room that is free at the start is used. ``warn`` gets one
    line, once, when bytes first go to the fallback. ``DuplicateIdentity`` where a living arena is there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        fallback: Path,
        warn: Callable[[str], None],
        idle_bytes: int | None = None,
    ) -> None:
        self._places = [Place(directory)]
        if fallback != directory:
            self._places.append(Place(fallback))
        self._warn = warn
        self._warned = False
        self._segments: list[_Segment] = []
        self._refusals: dict[Path, str] = {}
        for place in self._places:
            try:
                place.open()
            except StoreFull as refusal:
                self._refusals[place.directory] = str(refusal)
            except BaseException:
                self.close()
                raise
        room = sum(place.limit for place in self._places)
        self._index = Index(room if max_bytes is None else min(room, max_bytes))
        default_idle = max(IDLE_FLOOR_BYTES, int(self._index.limit * IDLE_SHARE))
        self._idle_bytes = default_idle if idle_bytes is None else idle_bytes

    # ----------------------------------------------------------------- leases
    def lease(self, owner: str, size: int) -> Extent:
        """At least ``size`` bytes (whole pages) for ``owner``; ``StoreFull`` where there is no room.

        Freed extents come back first, the most recently freed one before others; contents are arbitrary.
        """
        if size < 0:
            raise WireError(f"a lease of {size} bytes was asked for")
        for place in self._places:
            extent = self._lease_in(place, round_up(size)) if place.is_open else None
            if extent is not None:
                if place is not self._places[0]:
                    self._warn_once(place, size)
                self._index.take(owner, extent)
                return extent
        raise StoreFull(self._full(size))

    def release(self, extent: Extent) -> None:
        """End a lease (its bytes are kept for reuse); ``ValueError`` where it is not leased."""
        self._index.release(extent)
        self._trim_excess()

    def reclaim(self, owner: str) -> int:
        """End all leases of an owner that is gone; returns the bytes freed."""
        freed = self._index.reclaim(owner)
        self._trim_excess()
        return freed

    def pin(self, seg: int, off: int) -> Extent:
        """Keep the leased extent around ``off`` from reuse until ``unpin``; ``ValueError``: no lease."""
        return self._index.pin(seg, off)

    def unpin(self, extent: Extent) -> None:
        """Undo one ``pin``; frees the extent where its lease has ended meanwhile."""
        if self._index.unpin(extent):
            self._trim_excess()

    def view(self, seg: int, off: int, size: int, owner: str | None = None) -> Bytes:
        """These bytes, shared. ``WireError`` unless one lease (of ``owner``, if given) holds them all:

        addresses come from ranks, and bytes that are not leased may not exist.
        """
        holder = self._index.holder(seg, off, size)
        if holder is None or (owner is not None and holder != owner):
            whose = "the peer or another rank" if holder is not None else "nobody"
            raise WireError(f"{size} bytes at segment {seg}, offset {off} are leased to {whose}")
        return self._segments[seg].whole[off : off + size]

    def locate(self, array: Bytes) -> tuple[int, int] | None:
        """Segment and offset of an array that ``view`` made (or a slice of one); None for other memory."""
        address = array.__array_interface__["data"][0]  # half the price of ``array.ctypes.data``
        for seg, segment in enumerate(self._segments):
            if segment.address <= address < segment.address + segment.size:
                return seg, address - segment.address
        return None

    # ------------------------------------------------------------------ whole
    @property
    def paths(self) -> list[str]:
        """What ``ArenaMap`` needs: segment files, and the directories in which more may appear."""
        files = [str(segment.path) for segment in self._segments]
        return files + [str(place.directory) for place in self._places if place.is_open]

    def usage(self) -> dict[str, object]:
        """Bytes by state, owner and place: for people and for tests."""
        return {
            "max_bytes": self._index.limit,
            "leased_bytes": self._index.leased,
            "idle_bytes": self._index.idle,
            "owners": self._index.by_owner(),
            "places": [
                {
                    "directory": str(place.directory),
                    "limit_bytes": place.limit,
                    "used_bytes": self._index.committed_in(place.segments),
                    "segments": len(place.segments),
                }
                for place in self._places
                if place.is_open
            ],
            "fallback": self._warned,
        }

    def trim(self, keep_bytes: int = 0) -> int:
        """Give idle bytes beyond ``keep_bytes`` back, longest unused first; returns how many."""
        return self._give_back(self._index.oldest(keep_bytes))

    def close(self) -> None:
        """Unlink all segments and the directories; arrays that are still around stay valid."""
        for segment in self._segments:
            segment.path.unlink(missing_ok=True)
            os.close(segment.fd)
            del segment.whole
            with suppress(BufferError):
                segment.mapped.close()
        self._segments.clear()
        for place in self._places:
            place.close()

    # ---------------------------------------------------------------- helpers
    def _lease_in(self, place: Place, size: int) -> Extent | None:
        """Find and allocate; when refused, give as many idle bytes back and try once more."""
        extent = self._try_lease(place, size)
        if extent is not None:
            return extent
        leased = sum(self._index.leased_in(seg) for seg in place.segments)
        if size <= min(place.limit - leased, self._index.limit - self._index.leased):
            idle = self._index.committed_in(place.segments) - leased
            self._give_back(self._index.oldest(max(0, idle - size), place.segments))
            if self._index.limit - self._index.committed < size:
                self.trim(max(0, self._index.idle - size))
            return self._try_lease(place, size)
        return None

    def _try_lease(self, place: Place, size: int) -> Extent | None:
        room = place.limit - self._index.committed_in(place.segments)
        extent = self._index.find(size, place.segments, room)
        grows = extent is None and size <= min(room, self._index.limit - self._index.committed)
        if grows and self._add_segment(place, size):
            extent = self._index.find(size, place.segments, room)
        return extent if extent is not None and self._allocate(extent) else None

    def _allocate(self, extent: Extent) -> bool:
        fd = self._segments[extent.seg].fd
        for off, size in self._index.cold_ranges(extent):
            try:
                allocate(fd, off, size)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise StoreFull(f"{self._segments[extent.seg].path}: {error.strerror}") from error
                # Some file systems keep what they had allocated before they ran out.
                for start, length in self._index.cold_ranges(extent):
                    give_back(fd, start, length)
                return False
        return True

    def _add_segment(self, place: Place, size: int) -> bool:
        path = place.directory / f"{PREFIX}{len(self._segments)}"
        virtual = max(SEGMENT_BYTES, size)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(fd, virtual)
                mapped = mmap.mmap(fd, virtual)
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._refusals[place.directory] = f"{path} cannot be made: {error.strerror}"
            return False
        whole = np.frombuffer(mapped, np.uint8)
        self._segments.append(_Segment(path, fd, mapped, whole, whole.ctypes.data, virtual))
        place.segments.append(self._index.add_segment(virtual))
        return True

    def _trim_excess(self) -> None:
        if self._index.idle > self._idle_bytes:
            self._give_back(self._index.oldest(self._idle_bytes))

    def _give_back(self, extents: list[Extent]) -> int:
        given = 0
        for extent in extents:
            if give_back(self._segments[extent.seg].fd, extent.off, extent.size):
                self._index.chill(extent)
                given += extent.size
        return given

    def _warn_once(self, place: Place, size: int) -> None:
        if self._warned:
            return
        self._warned = True
        first = self._places[0]
        why = self._refusals.get(first.directory) or (
            f"{first.directory} has {first.free()} bytes free, of which this arena may use {first.limit} "
            f"in all; {size} are needed"
        )
        self._warn(
            f"shared memory goes to {place.directory}, which may be slower: {why}. To avoid it make /dev/shm "
            "larger (containers: --shm-size=2g; hosts: mount -o remount,size=2g /dev/shm)"
        )

    def _full(self, size: int) -> str:
        places = "; ".join(
            f"{place.directory}: {place.free()} bytes free, {self._index.committed_in(place.segments)} of "
            f"{place.limit} used"
            if place.is_open
            else self._refusals[place.directory]
            for place in self._places
        )
        return (
            f"no room for a tensor of {size} bytes in the arena: {self._index.leased} of "
            f"{self._index.limit} bytes leased ({places}). Free room there, raise arena_bytes in the peer's "
            "configuration, make /dev/shm larger (containers: --shm-size), or reduce smaller tensors"
        )
