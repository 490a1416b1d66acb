"""Ranks that come late, skip a barrier, or leave first: what those who wait for them see."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch
FOUR = [[0, 0, 0, 0], [0, 1, 0, 1]]


# -------------------------------------------------------------------- C077: barriers
def skips(rank: int, size: int, barriers: int) -> tuple[float, list[str]]:
    """Rank 3 leaves out the first of ``barriers`` and is gone then."""
    texts = []
    begin = time.monotonic()
    for _ in range(barriers - (rank == 3)):
        begin = time.monotonic()
        try:
            dist.barrier()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    if rank == 3:
        dist.destroy_process_group()
    return time.monotonic() - begin, texts


@pytest.mark.parametrize("placement", FOUR, ids=str)
@pytest.mark.parametrize("barriers", [1, 2])
def test_c077_a_rank_that_left_is_named_at_the_barrier_it_skipped(
    pool: Pool, placement: list[int], barriers: int
) -> None:
    values = pool.run(skips, placement, barriers)
    for seconds, texts in values[:3]:
        assert seconds < 10
        assert texts[:-1] == [""] * (barriers - 1)  # its one call pairs with the others' first
        assert "rank 3" in texts[-1]
        assert "destroyed" in texts[-1]
    assert values[3][1] == [""] * (barriers - 1)


def barrier_after(rank: int, size: int) -> None:
    tensor = torch.full((4_000_000,), float(rank))
    time.sleep(0.2 * rank)
    dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert (tensor[:: 1 << 10] == sum(range(size))).all()


@pytest.mark.parametrize("placement", FOUR, ids=str)
def test_c077_a_barrier_waits_for_what_was_called_before(pool: Pool, placement: list[int]) -> None:
    pool.run(barrier_after, placement)


# -------------------------------------------------------------------- C084: a rank that is late but alive
def late(rank: int, size: int) -> tuple[float, str]:
    patient = dist.new_group(timeout=timedelta(hours=1))
    idle = dist.new_group(timeout=timedelta(seconds=2))
    short = dist.new_group(timeout=timedelta(seconds=2))
    begin, text = time.monotonic(), ""
    if rank == 0:
        time.sleep(4)
    else:
        try:
            dist.barrier(group=short)
        except RuntimeError as error:
            text = str(error)
    seconds = time.monotonic() - begin
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=patient)
    dist.all_reduce(tensor, group=idle)  # nobody used it for longer than its timeout
    assert tensor[0] == size * size
    if rank == 0:
        time.sleep(2)
    else:  # one call's own timeout, shorter than its group's
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            patient.allreduce([tensor], timeout=timedelta(seconds=1)).wait()
    return seconds, text


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 2]], ids=str)
def test_c084_a_late_rank_is_named_as_alive(pool: Pool, placement: list[int]) -> None:
    for seconds, text in pool.run(late, placement)[1:]:
        assert 1.9 < seconds < 4.0
        assert "rank 0" in text
        assert "alive" in text


# -------------------------------------------------------------------- C023: leaving in any order
def leaves(rank: int, size: int, order: tuple[int, ...], count: int) -> None:
    tensor = torch.arange(count, dtype=torch.int32) if rank == 0 else torch.zeros(count, dtype=torch.int32)
    work = dist.broadcast(tensor, src=0, async_op=True)
    if rank == 0:
        work.wait()
    time.sleep(0.4 * order.index(rank))
    work.wait()
    assert torch.equal(tensor, torch.arange(count, dtype=torch.int32))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 0, 1]], ids=str)
def test_c023_ranks_leave_in_any_order_once_all_is_given(pool: Pool, placement: list[int]) -> None:
    for order in itertools.permutations(range(3)):
        pool.run(leaves, placement, order, 500_000)
