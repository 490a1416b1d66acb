"""All modes give the bits of the plain reference, for every dtype, op, size and placement."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cells import MODES, Call, all_calls, expected, run_calls
from support.pool import MACHINES, Pool

from frogzmq.types import OpKind, ReduceOp

pytestmark = pytest.mark.torch
SMALL = (0, 1, 7, 1000)
ORDERS = ("machine", "rank")
bounded = settings(
    max_examples=2, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate],
)  # fmt: skip


def check(
    pool: Pool,
    placement: list[int],
    calls: list[Call],
    *,
    seed: int = 1,
    order: str = "machine",
    delays: tuple[float, ...] = (),
    depth: int = 16,
) -> None:
    """Run the calls in all modes and compare every rank's bits with the reference's."""
    plain = [tuple(spec) for spec in calls]
    got = pool.run(run_calls, placement, plain, seed, order, MODES, delays, depth)
    wrong = [
        f"{mode} rank {rank}: {spec.descriptor().describe()}"
        for index, spec in enumerate(calls)
        for rank, want in enumerate(expected(spec, placement, seed, order))
        for mode, digests in zip(MODES, got[rank], strict=True)
        if digests[index] != want
    ]
    assert wrong == [], f"order {order}, placement {placement}, seed {seed}: {len(wrong)} wrong results"


def placements(size: int) -> list[list[int]]:
    """Every way to put the ranks on up to three machines, machines named by their lowest rank."""
    found: list[list[int]] = [[]]
    for _ in range(size):
        found = [[*p, m] for p in found for m in range(min(len(set(p)) + 1, MACHINES))]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@bounded
@given(data=st.data())
def test_every_cell_at_small_sizes(pool: Pool, size: int, data: st.DataObject) -> None:
    placement = data.draw(st.lists(st.integers(0, MACHINES - 1), min_size=size, max_size=size))
    count = data.draw(st.sampled_from(SMALL))
    order = data.draw(st.sampled_from(ORDERS))
    seed = data.draw(st.integers(0, 1 << 20))
    delays = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01]), max_size=5))
    check(pool, placement, all_calls(count, size), seed=seed, order=order, delays=tuple(delays))
