"""The blocks that messages stand in come back exactly once, whoever is done first."""

from __future__ import annotations

import pytest

from frogzmq.client.leases import Block, LeasePool
from frogzmq.client.letters import GivenBlocks
from frogzmq.wire.ranks import Leased


def pool_with(count: int) -> tuple[LeasePool, list[Block]]:
    pool = LeasePool(lambda datagram: None)
    for number in range(count):
        pool.on_leased(Leased(number, 0, number << 20, 1 << 20))
    blocks = [pool.take(100) for _ in range(count)]
    assert pool.take(100) is None
    return pool, [block for block in blocks if block is not None]


@pytest.mark.parametrize("first", ["written", "done"])
def test_a_block_comes_back_when_it_is_written_and_not_needed(first: str) -> None:
    pool, [block] = pool_with(1)
    given, key = GivenBlocks(pool), (3, 1)
    given.hold(9, key, block)
    assert given.held(9) == (1, 1 << 20)
    for step in (first, "done" if first == "written" else "written"):
        assert pool.take(100) is None
        given.written(9, key) if step == "written" else given.done(9, key)
    assert pool.take(100) is block
    assert given.held(9) == (0, 0)


def test_what_is_not_held_is_ignored() -> None:
    pool, [one, two] = pool_with(2)
    given = GivenBlocks(pool)
    given.hold(1, (0, 1), one)
    given.hold(2, (0, 1), two)
    given.written(1, (0, 1))
    given.written(2, (0, 1))
    assert not given.done(1, (0, 2))
    assert not given.done(3, (0, 1))
    assert given.done(1, (0, 1))
    assert not given.done(1, (0, 1)), "twice is once"
    assert (given.held(1), given.held(2)) == ((0, 0), (1, 1 << 20))
