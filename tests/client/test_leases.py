"""Blocks of the arena: sizes, reuse, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.client.leases import COARSE, KEEP_BYTES, MIN_BLOCK, LeasePool, block_size
from frogzmq.errors import StoreFull
from frogzmq.wire.ranks import Lease, Leased, Unlease, decode


class Peer:
    def __init__(self) -> None:
        self.sent: list[object] = []
        self.pool = LeasePool(lambda datagram: self.sent.append(decode(datagram)))

    def grant(self, off: int = 0) -> Leased:
        request = next(m for m in reversed(self.sent) if isinstance(m, Lease))
        leased = Leased(request.req, 0, off, request.size)
        self.pool.on_leased(leased)
        return leased


@given(st.integers(1, 1 << 40))
def test_block_is_large_enough_and_wastes_less_than_half(nbytes: int) -> None:
    size = block_size(nbytes)
    assert size >= nbytes
    assert size >= MIN_BLOCK
    assert size == MIN_BLOCK or size < 2 * nbytes
    assert nbytes < COARSE or size - nbytes < COARSE


def test_block_is_reused_after_it_was_given_back() -> None:
    peer = Peer()
    assert peer.pool.take(3 << 20) is None
    assert peer.sent == [Lease(1, 4 << 20)]
    peer.grant(off=4096)
    block = peer.pool.take(3 << 20)
    assert block is not None
    assert (block.off, block.size) == (4096, 4 << 20)
    peer.pool.give_back(block)
    assert peer.pool.take(4 << 20) is block
    assert len(peer.sent) == 1


def test_same_size_is_asked_for_once() -> None:
    peer = Peer()
    assert peer.pool.take(1) is None
    assert peer.pool.take(MIN_BLOCK) is None
    assert len(peer.sent) == 1


def test_idle_blocks_beyond_the_bound_go_back() -> None:
    peer = Peer()
    blocks = []
    for i in range(5):
        assert peer.pool.take(KEEP_BYTES // 4) is None
        peer.grant(off=i)
        blocks.append(peer.pool.take(KEEP_BYTES // 4))
    for block in blocks:
        peer.pool.give_back(block)
    assert [m for m in peer.sent if isinstance(m, Unlease)] == [Unlease(0, 0)]


def test_refusal_is_raised_when_nothing_of_ours_can_come_free() -> None:
    peer = Peer()
    assert peer.pool.take(1) is None
    assert peer.pool.on_refused(1, StoreFull("full"))
    with pytest.raises(StoreFull, match="full"):
        peer.pool.take(1)
    assert peer.pool.take(1) is None, "the next op asks again"


def test_refusal_waits_for_busy_blocks_and_returns_idle_ones() -> None:
    peer = Peer()
    assert peer.pool.take(MIN_BLOCK) is None
    peer.grant(off=7)
    small = peer.pool.take(MIN_BLOCK)
    assert peer.pool.take(2 * MIN_BLOCK) is None
    peer.pool.on_refused(2, StoreFull("full"))
    assert peer.pool.take(2 * MIN_BLOCK) is None, "the busy block may come free"
    peer.pool.give_back(small)
    assert peer.pool.take(2 * MIN_BLOCK) is None
    assert peer.sent[-2:] == [Unlease(0, 7), Lease(3, 2 * MIN_BLOCK)]


def test_unknown_refusal_is_not_ours() -> None:
    assert not Peer().pool.on_refused(0, StoreFull("x"))
