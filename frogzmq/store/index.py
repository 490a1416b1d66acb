"""The pure allocator behind the arena: who holds which bytes of which segment. No files, no memory.

Each segment is tiled by blocks. A block is **leased**, or free and then **warm** (the file system has given
the bytes; using them again costs nothing) or **cold** (only address space). Changes that need the file
system come in two steps, so that a failed system call leaves nothing to undo: ``find`` then ``take``
(between them the caller allocates ``cold_ranges``), ``oldest`` then ``chill`` (between them it gives back).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GRAIN = 4096
"""Extents are whole pages: the unit in which files give and take room."""
SPLIT_FACTOR = 4
"""A warm run of more than this many times the wanted size is split only where no cold room is left:
cutting small pieces off large warm blocks would make the next large lease pay for new pages."""


class Extent(NamedTuple):
    """``size`` bytes at ``off`` of segment ``seg``."""

    seg: int
    off: int
    size: int


@dataclass(slots=True)
class _Block:
    off: int
    size: int
    owner: str | None = None
    warm: bool = False
    tick: int = 0
    pins: int = 0
    doomed: bool = False


@dataclass(slots=True)
class _Segment:
    size: int
    starts: list[int]
    blocks: dict[int, _Block]
    recent: dict[int, list[int]] = field(default_factory=dict)
    """Size -> offsets of warm blocks of that size, last freed last; stale entries are skipped."""
    leased: int = 0
    idle: int = 0

    def at(self, off: int) -> _Block:
        """The block that byte ``off`` is in."""
        return self.blocks[self.starts[bisect_right(self.starts, off) - 1]]

    def put(self, block: _Block) -> None:
        insort(self.starts, block.off)
        self.blocks[block.off] = block
        if block.warm and block.owner is None:
            self.recent.setdefault(block.size, []).append(block.off)

    def drop(self, block: _Block) -> None:
        del self.starts[bisect_left(self.starts, block.off)]
        del self.blocks[block.off]

    def covering(self, start: int, stop: int) -> list[_Block]:
        """Blocks that share bytes with ``start:stop``, ascending."""
        first = bisect_right(self.starts, start) - 1
        last = bisect_left(self.starts, stop)
        return [self.blocks[off] for off in self.starts[first:last]]


def round_up(size: int) -> int:
    """``size`` in whole grains, at least one."""
    return max(1, -(-size // GRAIN)) * GRAIN


class Index:
    """Extents of several segments, never more than ``limit`` bytes warm or leased together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._segments: list[_Segment] = []
        self._owned: dict[str, set[Extent]] = {}
        self._tick = 0

    # ------------------------------------------------------------------ sizes
    @property
    def leased(self) -> int:
        """Bytes leased."""
        return sum(segment.leased for segment in self._segments)

    @property
    def idle(self) -> int:
        """Bytes free but warm."""
        return sum(segment.idle for segment in self._segments)

    @property
    def committed(self) -> int:
        """Bytes that the file systems have given: leased and idle."""
        return self.leased + self.idle

    def committed_in(self, segments: Iterable[int]) -> int:
        """Bytes given in some segments."""
        return sum(self._segments[seg].leased + self._segments[seg].idle for seg in segments)

    def leased_in(self, seg: int) -> int:
        """Bytes leased in one segment."""
        return self._segments[seg].leased

    def by_owner(self) -> dict[str, int]:
        """Bytes leased by each owner."""
        return {owner: sum(e.size for e in extents) for owner, extents in self._owned.items()}

    # ----------------------------------------------------------------- leases
    def add_segment(self, size: int) -> int:
        """A new, wholly cold segment; its number."""
        assert size == round_up(size), size
        self._segments.append(_Segment(size, [0], {0: _Block(0, size)}))
        return len(self._segments) - 1

    def find(self, size: int, segments: Sequence[int], room: int) -> Extent | None:
        """Where ``size`` bytes fit in one of ``segments`` with at most ``room`` new bytes; None: nowhere.

        Best first: the block of that very size that was freed last (its pages are the likeliest to be in
        caches and page tables), the smallest warm run, the smallest cold block, any run that fits.
        """
        size = round_up(size)
        for seg in segments:
            if (off := self._last_freed(self._segments[seg], size)) is not None:
                return Extent(seg, off, size)
        room = min(room, self.limit - self.committed)
        best = min((choice for seg in segments for choice in self._choices(seg, size, room)), default=None)
        return None if best is None else Extent(best[2], best[3], size)

    def cold_ranges(self, extent: Extent) -> list[tuple[int, int]]:
        """Offset and size of the parts of a free extent that must be allocated before ``take``."""
        seg, off, size = extent
        segment = self._segments[seg]
        whole = segment.blocks.get(off)
        if whole is not None and whole.size == size and whole.warm:
            assert whole.owner is None, f"{extent} is leased by {whole.owner}"
            return []
        ranges = []
        for block in segment.covering(off, off + size):
            assert block.owner is None, f"{extent} is leased by {block.owner}"
            if not block.warm:
                start, stop = max(off, block.off), min(off + size, block.off + block.size)
                ranges.append((start, stop - start))
        return ranges

    def take(self, owner: str, extent: Extent) -> None:
        """Lease an extent that ``find`` named and whose cold ranges are allocated by now."""
        seg, off, size = extent
        segment = self._segments[seg]
        whole = segment.blocks.get(off)
        if whole is not None and whole.size == size and whole.warm and whole.owner is None:
            whole.owner = owner  # the common case: a block that comes back as it went
            segment.idle -= size
            segment.leased += size
            self._owned.setdefault(owner, set()).add(extent)
            return
        fresh = sum(size for _, size in self.cold_ranges(extent))
        assert self.committed + fresh <= self.limit, "find was not asked"
        for block in segment.covering(off, off + size):
            segment.drop(block)
            if block.warm:
                segment.idle -= block.size
            for start, stop in ((block.off, off), (off + size, block.off + block.size)):
                if start < stop:
                    segment.put(_Block(start, stop - start, warm=block.warm, tick=block.tick))
                    segment.idle += (stop - start) if block.warm else 0
        segment.put(_Block(off, size, owner=owner, warm=True))
        segment.leased += size
        self._owned.setdefault(owner, set()).add(extent)

    def release(self, extent: Extent) -> bool:
        """End a lease; False where a pin still holds the bytes (they are freed with the last ``unpin``).

        ``ValueError`` where the extent is not leased (a second release).
        """
        block = self._segments[extent.seg].blocks.get(extent.off) if self._known(extent.seg) else None
        if block is None or block.owner is None or block.size != extent.size or block.doomed:
            raise ValueError(f"{extent} is not leased")
        if block.pins:
            block.doomed = True
            return False
        self._free(extent.seg, block)
        return True

    def reclaim(self, owner: str) -> int:
        """End every lease of ``owner``; the bytes freed at once (pinned ones follow their last unpin)."""
        freed = 0
        for extent in sorted(self._owned.get(owner, ())):
            block = self._segments[extent.seg].blocks[extent.off]
            if not block.doomed and self.release(extent):
                freed += extent.size
        return freed

    def pin(self, seg: int, off: int) -> Extent:
        """Keep the leased extent that ``off`` is in, whatever becomes of its lease; ``ValueError``: none."""
        block = self._segments[seg].at(off) if self._known(seg) and off >= 0 else None
        if block is None or block.owner is None or block.doomed or off >= block.off + block.size:
            raise ValueError(f"no lease at segment {seg}, offset {off}")
        block.pins += 1
        return Extent(seg, block.off, block.size)

    def unpin(self, extent: Extent) -> bool:
        """Undo one ``pin``; True where that freed the extent."""
        block = self._segments[extent.seg].blocks[extent.off]
        if block.pins <= 0:
            raise ValueError(f"{extent} is not pinned")
        block.pins -= 1
        if block.pins or not block.doomed:
            return False
        self._free(extent.seg, block)
        return True

    def holder(self, seg: int, off: int, size: int) -> str | None:
        """Owner of the lease that holds all of these bytes; None where no single lease does."""
        if not self._known(seg) or off < 0 or size < 0 or off + size > self._segments[seg].size:
            return None
        block = self._segments[seg].at(min(off, self._segments[seg].size - 1))
        return block.owner if off + size <= block.off + block.size else None

    # ------------------------------------------------------------------- trim
    def oldest(self, keep: int, segments: Sequence[int] | None = None) -> list[Extent]:
        """Warm blocks to give back, longest unused first, so that at most ``keep`` idle bytes remain."""
        chosen = range(len(self._segments)) if segments is None else segments
        warm = sorted(
            (block.tick, seg, block.off, block.size)
            for seg in chosen
            for block in self._segments[seg].blocks.values()
            if block.warm and block.owner is None
        )
        excess = sum(size for *_, size in warm) - keep
        out = []
        for _, seg, off, size in warm:
            if excess <= 0:
                break
            out.append(Extent(seg, off, size))
            excess -= size
        return out

    def chill(self, extent: Extent) -> None:
        """A warm block was given back to the file system: it is cold and joins its cold neighbours."""
        segment = self._segments[extent.seg]
        block = segment.blocks[extent.off]
        assert (block.owner, block.warm, block.size) == (None, True, extent.size), extent
        segment.idle -= block.size
        start, stop = block.off, block.off + block.size
        segment.drop(block)
        for near in (segment.at(start - 1) if start else None, segment.blocks.get(stop)):
            if near is not None and near.owner is None and not near.warm:
                segment.drop(near)
                start, stop = min(start, near.off), max(stop, near.off + near.size)
        segment.put(_Block(start, stop - start))

    # ---------------------------------------------------------------- helpers
    def _known(self, seg: int) -> bool:
        return 0 <= seg < len(self._segments)

    def _free(self, seg: int, block: _Block) -> None:
        segment = self._segments[seg]
        owner = block.owner
        assert owner is not None
        extents = self._owned[owner]
        extents.discard(Extent(seg, block.off, block.size))
        if not extents:
            del self._owned[owner]
        self._tick += 1
        block.owner, block.tick, block.doomed = None, self._tick, False
        segment.recent.setdefault(block.size, []).append(block.off)
        segment.leased -= block.size
        segment.idle += block.size

    @staticmethod
    def _last_freed(segment: _Segment, size: int) -> int | None:
        stack = segment.recent.get(size, [])
        while stack:
            block = segment.blocks.get(stack[-1])
            if block is not None and block.owner is None and block.warm and block.size == size:
                return block.off
            stack.pop()
        segment.recent.pop(size, None)
        return None

    def _choices(self, seg: int, size: int, room: int) -> Iterator[tuple[int, int, int, int]]:
        """(class, run size, segment, offset) of everything that fits; the least is the best."""
        segment = self._segments[seg]
        run = warm = fresh = 0
        for off in segment.starts:
            block = segment.blocks[off]
            end = off + block.size
            if block.owner is not None:
                run = warm = fresh = 0
                continue
            run += block.size
            warm = warm + block.size if block.warm else 0
            if warm >= size:
                yield (0 if warm <= SPLIT_FACTOR * size else 2), warm, seg, end - warm
            elif not block.warm and block.size >= size and size <= room:
                yield 1, block.size, seg, off
            # The last ``size`` bytes of a mixed run: what is cold in them was counted from its start on.
            fresh += 0 if block.warm else block.size
            if run >= size and (min(fresh, size) <= room or self._fresh(seg, end - size, size) <= room):
                yield 3, run, seg, end - size

    def _fresh(self, seg: int, off: int, size: int) -> int:
        return sum(n for _, n in self.cold_ranges(Extent(seg, off, size)))

    def check(self) -> None:
        """Assert that the books are right: for tests and for the curious."""
        for seg, segment in enumerate(self._segments):
            assert segment.starts == sorted(segment.blocks)
            at = leased = idle = 0
            cold = False
            for off in segment.starts:
                block = segment.blocks[off]
                assert block.off == off == at
                assert block.size == round_up(block.size)
                at += block.size
                if block.owner is not None:
                    assert Extent(seg, off, block.size) in self._owned[block.owner]
                    leased += block.size
                elif block.warm:
                    idle += block.size
                else:
                    assert not cold, "cold neighbours are one block"
                cold = block.owner is None and not block.warm
            assert (at, leased, idle) == (segment.size, segment.leased, segment.idle)
        assert self.committed <= self.limit
        assert sum(self.by_owner().values()) == self.leased
