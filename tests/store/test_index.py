"""The allocator against a model that is a plain dict of leases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from frogzmq.store.index import GRAIN, SPLIT_FACTOR, Extent, Index, round_up

SEGMENTS = (16 * GRAIN, 24 * GRAIN)
LIMIT = 32 * GRAIN
OWNERS = ("a", "b", "c")


class IndexMachine(RuleBasedStateMachine):
    """Leases, releases, pins, reclaims and trims in any order."""

    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(LIMIT)
        self.segments = [self.index.add_segment(size) for size in SEGMENTS]
        self.leases: dict[Extent, str] = {}
        self.pins: dict[Extent, int] = {}
        self.doomed: set[Extent] = set()
        self.warm: set[tuple[int, int]] = set()  # (segment, page number) of pages that were allocated

    def pages(self, extent: Extent) -> set[tuple[int, int]]:
        first = extent.off // GRAIN
        return {(extent.seg, page) for page in range(first, first + extent.size // GRAIN)}

    def held(self) -> set[tuple[int, int]]:
        return {page for extent in self.leases for page in self.pages(extent)}

    @rule(owner=st.sampled_from(OWNERS), size=st.integers(0, 20 * GRAIN), fails=st.booleans())
    def lease(self, owner: str, size: int, fails: bool) -> None:
        extent = self.index.find(size, self.segments, LIMIT)
        if extent is None:
            self.assert_nothing_fits(round_up(size))
            return
        assert extent.size == round_up(size)
        assert 0 <= extent.off <= SEGMENTS[extent.seg] - extent.size
        assert not self.pages(extent) & self.held(), "an extent is leased twice"
        cold = {
            (extent.seg, page)
            for off, length in self.index.cold_ranges(extent)
            for page in range(off // GRAIN, (off + length) // GRAIN)
        }
        assert cold == self.pages(extent) - self.warm
        if fails:  # the file system refused: nothing must have changed
            return
        self.index.take(owner, extent)
        self.leases[extent] = owner
        self.warm |= self.pages(extent)

    def assert_nothing_fits(self, size: int) -> None:
        held = self.held()
        for seg, total in enumerate(SEGMENTS):
            for off in range(0, total - size + 1, GRAIN):
                pages = self.pages(Extent(seg, off, size))
                # Only placements that end a free block are tried where warm and cold are mixed; with
                # everything cold or everything warm, "does not fit" must be exact.
                uniform = pages <= self.warm or not pages & self.warm
                if uniform and not pages & held:
                    assert len(self.warm) + len(pages - self.warm) > LIMIT // GRAIN

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        live = sorted(set(self.leases) - self.doomed)
        if not live:
            return
        extent = data.draw(st.sampled_from(live))
        freed = self.index.release(extent)
        assert freed == (extent not in self.pins)
        self.end(extent)
        with pytest.raises(ValueError, match="not leased"):
            self.index.release(extent)

    def end(self, extent: Extent) -> None:
        if extent in self.pins:
            self.doomed.add(extent)
        else:
            del self.leases[extent]

    @rule(owner=st.sampled_from(OWNERS))
    def reclaim(self, owner: str) -> None:
        mine = [e for e, who in self.leases.items() if who == owner and e not in self.doomed]
        assert self.index.reclaim(owner) == sum(e.size for e in mine if e not in self.pins)
        for extent in mine:
            self.end(extent)

    @rule(data=st.data(), target=pinned)
    def pin(self, data: st.DataObject) -> Extent | None:
        live = sorted(set(self.leases) - self.doomed)
        if not live:
            return None
        extent = data.draw(st.sampled_from(live))
        inside = data.draw(st.integers(extent.off, extent.off + extent.size - 1))
        assert self.index.pin(extent.seg, inside) == extent
        self.pins[extent] = self.pins.get(extent, 0) + 1
        return extent

    @rule(extent=pinned)
    def unpin(self, extent: Extent | None) -> None:
        if extent is None or extent not in self.pins:
            return
        self.pins[extent] -= 1
        last = self.pins[extent] == 0
        if last:
            del self.pins[extent]
        frees = last and extent in self.doomed
        assert self.index.unpin(extent) == frees
        if frees:
            self.doomed.discard(extent)
            del self.leases[extent]

    @rule(keep=st.integers(0, LIMIT))
    def trim(self, keep: int) -> None:
        for extent in self.index.oldest(keep):
            assert not self.pages(extent) & self.held()
            self.index.chill(extent)
            self.warm -= self.pages(extent)
        assert self.index.idle <= keep

    @invariant()
    def books_agree(self) -> None:
        self.index.check()
        assert self.index.leased == sum(extent.size for extent in self.leases)
        assert self.index.committed == len(self.warm) * GRAIN <= LIMIT
        for owner in OWNERS:
            mine = sum(e.size for e, who in self.leases.items() if who == owner)
            assert self.index.by_owner().get(owner, 0) == mine
        for extent, owner in self.leases.items():
            assert self.index.holder(*extent) == owner

    def teardown(self) -> None:
        """Whatever happened, all room comes back in one piece."""
        for extent, count in list(self.pins.items()):
            for _ in range(count):
                self.index.unpin(extent)
        for owner in OWNERS:
            self.index.reclaim(owner)
        assert self.index.leased == 0
        assert self.index.by_owner() == {}
        for extent in self.index.oldest(0):
            self.index.chill(extent)
        for seg, size in zip(self.segments, SEGMENTS, strict=True):
            assert self.index.find(size, [seg], LIMIT) == Extent(seg, 0, size)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def make(size: int = 64 * GRAIN, limit: int | None = None) -> tuple[Index, list[int]]:
    index = Index(size if limit is None else limit)
    return index, [index.add_segment(size)]


def lease(index: Index, segments: list[int], size: int, owner: str = "a") -> Extent:
    extent = index.find(size, segments, 1 << 40)
    assert extent is not None
    index.take(owner, extent)
    return extent


def test_the_block_freed_last_is_leased_first() -> None:
    index, segments = make()
    blocks = [lease(index, segments, GRAIN) for _ in range(4)]
    for block in (blocks[2], blocks[0], blocks[3]):
        index.release(block)
    assert [lease(index, segments, GRAIN) for _ in range(3)] == [blocks[3], blocks[0], blocks[2]]


def test_large_warm_blocks_are_not_cut_while_there_is_cold_room() -> None:
    index, segments = make()
    large = lease(index, segments, (SPLIT_FACTOR + 1) * GRAIN)
    index.release(large)
    small = lease(index, segments, GRAIN)
    assert small.off >= large.off + large.size
    assert index.find(large.size, segments, 0) == large


def test_adjacent_warm_blocks_serve_a_larger_lease_without_new_room() -> None:
    index, segments = make()
    blocks = [lease(index, segments, GRAIN) for _ in range(3)]
    for block in blocks:
        index.release(block)
    merged = index.find(3 * GRAIN, segments, 0)
    assert merged == Extent(0, 0, 3 * GRAIN)
    assert index.cold_ranges(merged) == []


def test_the_smallest_gap_that_fits_is_used() -> None:
    index, segments = make()
    sizes = (5, 1, 3, 1, 4, 1)
    blocks = [lease(index, segments, n * GRAIN) for n in sizes]
    for block in blocks[::2]:
        index.release(block)
    assert index.find(2 * GRAIN, segments, 0) == Extent(0, blocks[2].off, 2 * GRAIN)


def test_the_limit_counts_idle_bytes_too() -> None:
    index, segments = make(64 * GRAIN, limit=8 * GRAIN)
    index.release(lease(index, segments, 6 * GRAIN))
    lease(index, segments, 6 * GRAIN)
    assert index.find(3 * GRAIN, segments, 1 << 40) is None
    assert index.find(2 * GRAIN, segments, 1 << 40) is not None
    assert index.find(2 * GRAIN, segments, GRAIN) is None, "no more new bytes than the caller has room for"


def test_addresses_outside_leases_have_no_holder() -> None:
    index, segments = make()
    extent = lease(index, segments, 2 * GRAIN)
    assert index.holder(0, 5, GRAIN) == "a"
    for seg, off, size in ((0, 0, extent.size + 1), (0, extent.size, 1), (1, 0, 1), (0, -1, 1), (0, 0, -1),
                           (-1, 0, 1), (0, 1 << 60, 1)):  # fmt: skip
        assert index.holder(seg, off, size) is None
    for seg, off in ((0, extent.size), (3, 0), (0, -1)):
        with pytest.raises(ValueError, match="no lease"):
            index.pin(seg, off)
