"""All modes give the bits of the plain reference, for every dtype, op, size and placement."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.cells import MODES, Call, all_calls, expected, run_calls
from support.pool import MACHINES, Pool

from frogzmq.types import OpKind, ReduceOp

pytestmark = pytest.mark.torch
SMALL = (0, 1, 7, 1000)
ORDERS = ("machine", "rank")
DELAYS_S = (0.0, 0.0, 0.001, 0.005)
R = ReduceOp


def bounded(examples: int) -> settings:
    """As many examples, the same in every run; a smaller failing one is not looked for (it takes long)."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def check(
    pool: Pool,
    placement: Sequence[int],
    calls: Sequence[Call],
    *,
    seed: int = 1,
    order: str = "machine",
    delays: Sequence[float] = (),
    depth: int = 16,
    deadline_s: float = 60.0,
) -> None:
    """Run the calls in all modes and compare every rank's bits with the reference's."""
    plain = [tuple(spec) for spec in calls]
    got = pool.run(
        run_calls, placement, plain, seed, order, MODES, tuple(delays), depth, deadline_s=deadline_s
    )
    wrong = [
        f"{mode} rank {rank}: {spec.descriptor().describe()}"
        for index, spec in enumerate(calls)
        for rank, want in enumerate(expected(spec, placement, seed, order))
        for mode, digests in zip(MODES, got[rank], strict=True)
        if digests[index] != want
    ]
    assert wrong == [], f"order {order}, placement {placement}, seed {seed}: {len(wrong)} wrong results"


def placements(size: int) -> list[list[int]]:
    """Every way to put the ranks on machines, which are numbered in the order of their lowest rank."""
    found: list[list[int]] = [[]]
    for _ in range(size):
        found = [[*p, m] for p in found for m in range(min(len(set(p)) + 1, MACHINES))]
    return found


placed = st.lists(st.integers(0, MACHINES - 1), min_size=1, max_size=5)
orders = st.sampled_from(ORDERS)
seeds = st.integers(0, 1 << 20)
delayed = st.lists(st.sampled_from(DELAYS_S), max_size=5)


@bounded(4)
@given(placement=placed, count=st.sampled_from(SMALL), order=orders, seed=seeds, delays=delayed)
@example(placement=[0], count=7, order="machine", seed=1, delays=[])
@example(placement=[1, 0], count=1000, order="machine", seed=2, delays=[0.001])
@example(placement=[0, 1, 0], count=1000, order="rank", seed=3, delays=[0.0, 0.005])
@example(placement=[0, 1, 2, 0], count=1, order="machine", seed=4, delays=[0.0, 0.001])
@example(placement=[0, 1, 0, 1, 2], count=1000, order="machine", seed=5, delays=[0.0, 0.0, 0.001])
@example(placement=[2, 2, 1, 0, 0], count=7, order="rank", seed=6, delays=[])
@example(placement=[0, 0, 0, 0, 0], count=1000, order="machine", seed=7, delays=[])
@example(placement=[0, 1, 2], count=0, order="machine", seed=8, delays=[0.002])
def test_every_cell_at_small_sizes(
    pool: Pool, placement: list[int], count: int, order: str, seed: int, delays: list[float]
) -> None:
    check(pool, placement, all_calls(count, len(placement)), seed=seed, order=order, delays=delays)


@bounded(3)
@given(placement=placed, order=orders, seed=seeds, delays=delayed, some=st.integers(0, 11))
@example(placement=[0, 1, 0, 2], order="machine", seed=1, delays=[0.0, 0.02], some=3)
def test_100003_elements(
    pool: Pool, placement: list[int], order: str, seed: int, delays: list[float], some: int
) -> None:
    calls = all_calls(100_003, len(placement))[some::12]
    check(pool, placement, calls, seed=seed, order=order, delays=delays, depth=4)


def test_100003_elements_in_every_cell(pool: Pool) -> None:
    check(pool, [0, 1, 0], all_calls(100_003, 3), depth=4)


@pytest.mark.parametrize(
    ("placement", "order", "calls"),
    [
        ([0, 1], "machine", [(OpKind.ALL_REDUCE, R.SUM, "float32"), (OpKind.ALL_REDUCE, R.MAX, "int16")]),
        ([0, 0, 1, 2, 1], "machine", [(OpKind.ALL_REDUCE, R.SUM, "float32")]),
        ([0, 1, 2], "rank", [(OpKind.ALL_REDUCE, R.AVG, "bfloat16"), (OpKind.BROADCAST, R.NONE, "uint8", 2)]),
        ([0, 0, 0, 0], "machine", [(OpKind.ALL_REDUCE, R.SUM, "float16"), (OpKind.REDUCE, R.MIN, "int8", 1)]),
        ([0, 1, 0], "machine", [(OpKind.ALL_GATHER, R.NONE, "int8"), (OpKind.REDUCE, R.AVG, "float64", 2)]),
    ],
)  # fmt: skip
def test_5_million_elements(pool: Pool, placement: list[int], order: str, calls: list[tuple]) -> None:
    wanted = [Call(kind, reduce, dtype, 5_000_000, *root) for kind, reduce, dtype, *root in calls]
    check(pool, placement, wanted, order=order, depth=0, delays=[0.0, 0.05, 0.0])


# ------------------------------------------------------------------------- C079: run to run
def one_hash(pool: Pool, size: int, dtype: str, runs: int, longest_s: float) -> None:
    """A million values: the same bits on all ranks in all runs, whoever comes first; with order ``rank`` also
    wherever the ranks are."""
    rng = random.Random(size)
    spec = Call(OpKind.ALL_REDUCE, R.SUM, dtype, 1_000_000)
    hashes: dict[str, set[str]] = {}
    for order, placement in (
        ("machine", [r % 2 for r in range(size)]),
        ("machine", [r % 2 for r in range(size)]),
        ("rank", [0] * size),
        ("rank", [r % MACHINES for r in range(size)]),
    ):
        delays = [rng.uniform(0.0, longest_s) for _ in range(7 * runs)]
        calls = [tuple(spec)] * (runs // 4)
        for done in pool.run(run_calls, placement, calls, 9, order, ["auto"], delays, 0):
            assert len(done[0]) == runs // 4
            hashes.setdefault(order, set()).update(done[0])
        want = expected(spec, placement, 9, order)[0]
        assert hashes[order] == {want}, f"{order}, {placement}"


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c079_one_hash_over_ranks_runs_and_arrival_orders(pool: Pool, dtype: str, size: int) -> None:
    one_hash(pool, size, dtype, runs=8, longest_s=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("float32", 5), ("bfloat16", 4)])
def test_c079_twenty_runs_with_long_delays(pool: Pool, dtype: str, size: int) -> None:
    one_hash(pool, size, dtype, runs=20, longest_s=0.5)


# ------------------------------------------------------------------------------ everything
@pytest.mark.slow
@pytest.mark.usefixtures("exhaustive")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_placement_in_every_cell(pool: Pool, size: int, order: str) -> None:
    for index, placement in enumerate(placements(size)):
        small = [spec for count in SMALL for spec in all_calls(count, size)]
        check(pool, placement, small, order=order, seed=index, delays=DELAYS_S[index % 3 :])
        check(pool, placement, all_calls(100_003, size)[index % 5 :: 5], order=order, seed=index, depth=4)


@pytest.mark.slow
@pytest.mark.usefixtures("exhaustive")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("placement", "order"),
    [
        ([0], "machine"), ([1, 0], "machine"), ([0, 1, 0], "rank"), ([0, 1, 2, 0], "machine"),
        ([0, 0, 1, 2, 1], "machine"),
    ],
)  # fmt: skip
def test_5_million_elements_in_every_cell(pool: Pool, placement: list[int], order: str) -> None:
    calls = all_calls(5_000_000, len(placement))
    calls.sort(key=lambda spec: spec.dtype)  # what a rank gives is made once for each dtype
    for start in range(0, len(calls), 26):
        check(pool, placement, calls[start : start + 26], order=order, depth=0, deadline_s=300.0)
