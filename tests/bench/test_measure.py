from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.bench.measure import (
    Block,
    Sample,
    join_ranks,
    peak_memory,
    percentile,
    ratio,
    slowest,
    summarise,
)

TIMES = st.lists(st.floats(0, 1e3), min_size=1, max_size=30)


def block(
    label: str, times: list[float], *, nbytes: int = 1 << 20, began: float = 0.0, cpu: float = 0.0
) -> Block:
    return Block(label, nbytes, began, began + sum(times), times, cpu, [3 * nbytes, 0])


@given(TIMES)
def test_the_middle_percentile_is_the_median(times: list[float]) -> None:
    assert percentile(times, 0.5) == pytest.approx(statistics.median(times))


@given(TIMES, st.floats(0, 1), st.floats(0, 1))
def test_percentiles_are_ordered_and_inside(times: list[float], one: float, two: float) -> None:
    low, high = sorted((one, two))
    slack = 1e-9 * max(times)
    assert (
        min(times) - slack
        <= percentile(times, low)
        <= percentile(times, high) + slack
        <= max(times) + 2 * slack
    )


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


def test_the_slowest_rank_counts_iteration_by_iteration() -> None:
    assert slowest([[1.0, 5.0, 2.0], [4.0, 3.0, 2.5]]) == [4.0, 5.0, 2.5]
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        slowest([[1.0, 2.0, 3.0], [1.0, 2.0]])


def row(rank: int, host: int, **changes: Any) -> dict[str, Any]:
    base = {
        "label": "gloo", "collective": "reduce", "nbytes": 8, "rank": rank, "host": host,
        "began": 1.0 + rank, "ended": 5.0 + rank,
        "cpu_s": 0.5, "sent": 100, "iterations": [1.0 + rank, 2.0 - rank],
    }  # fmt: skip
    return base | changes


def test_ranks_are_joined_into_one_block() -> None:
    joined = join_ranks([row(0, 0), row(1, 0), row(2, 1, iterations=[0.0, 7.0])], hosts=2)
    assert joined == Block("gloo", 8, 1.0, 7.0, [2.0, 7.0], 1.5, [200, 100], "reduce")


def test_ranks_that_disagree_on_what_they_measured_are_an_error() -> None:
    with pytest.raises(ValueError, match="different things"):
        join_ranks([row(0, 0), row(1, 0, nbytes=16)], hosts=1)


def test_figures_come_from_the_own_blocks_only() -> None:
    blocks = [
        block("gloo", [2.0, 4.0], cpu=6.0), block("frogzmq", [1.0, 2.0], cpu=3.0),
        block("gloo", [6.0], cpu=4.0), block("gloo", [100.0], nbytes=4),
    ]  # fmt: skip
    gloo = summarise("gloo", 1 << 20, blocks)
    frogzmq = summarise("frogzmq", 1 << 20, blocks)
    assert (gloo.count, gloo.median_s) == (3, 4.0)
    # Blocks run one iteration more than they time: 3 + 2 ops.
    assert gloo.cpu_s_per_op == pytest.approx(2.0)
    assert gloo.cpu_s_per_gb == pytest.approx(2.0 / (1 << 20) * 1e9)
    assert gloo.sent_per_op == [pytest.approx(2 * (3 << 20) / 5), 0.0]
    assert ratio(gloo, frogzmq) == pytest.approx(4.0 / 1.5)
    assert summarise("gloo", 4, blocks).cpu_s_per_gb is None
    with pytest.raises(ValueError, match="no iterations of all_reduce by mpi"):
        summarise("mpi", 4, blocks)


def test_memory_counts_samples_inside_the_turns() -> None:
    blocks = [block("x", [1.0], began=10.0), block("x", [1.0], began=20.0)]
    samples = [Sample(9.9, 999, 999, 999), Sample(10.5, 150, 7, 1000), Sample(20.5, 180, 5, 900)]
    assert peak_memory(blocks, samples, tensors=100, own_peers=False) == 80
    assert peak_memory(blocks, samples, tensors=100, own_peers=True) == 50 + 7 + 1000
    assert peak_memory(blocks, samples, tensors=500, own_peers=False) == 0
    assert peak_memory(blocks, samples[:1], tensors=100, own_peers=True) is None
