"""torch's own tests of a backend, ``DistributedTest`` from its wheel: what passes for Gloo passes here.

``gloo.json`` holds what passes for Gloo itself in this harness (``python tests/torchsuite/record.py`` writes
it), ``exceptions.json`` what does not pass here, with the reason. By default a selection runs;
``--exhaustive`` runs everything, at worlds 2, 3 and 4, by our own name and standing behind "gloo".
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchsuite.harness import Suite

HERE = Path(__file__).parent
GLOO: dict[str, list[str]] = json.loads((HERE / "gloo.json").read_text())["passing"]
EXCEPTIONS: dict[str, str] = json.loads((HERE / "exceptions.json").read_text())
BY_NAME = {2: 66, 3: 80, 4: 81}
"""How many of them torch lets a third-party name run; the others are written for a list of names."""
SELECTION = [
    "test_accumulate_gradients_no_sync_allreduce_hook", "test_all_gather_coalesced_with_empty",
    "test_all_reduce_coalesced_group_sum", "test_barrier_timeout_group", "test_batch_isend_irecv_gloo_tags",
    "test_DistributedDataParallelCPU_grad_is_view", "test_gather_group", "test_get_future", "test_isend",
    "test_monitored_barrier_wait_all_ranks", "test_reduce_group_max", "test_scatter_object_list",
    "test_send_recv_any_source", "test_sparse_all_reduce_sum",
]  # fmt: skip
pytestmark = [pytest.mark.torch, pytest.mark.torchsuite, pytest.mark.timeout(900)]


def check(ranks: int, backend: str, tests: list[str]) -> int:
    """Run them; how many passed. Whatever neither passes nor is skipped by its backend's name is an error."""
    outcomes = Suite(ranks, backend, ours=True).run(tests)
    failed = {name: each.text[-1500:] for name, each in outcomes.items() if each.outcome == "fail"}
    assert not failed, "\n\n".join(f"{name}: {text}" for name, text in failed.items())
    skipped = {name: each.text for name, each in outcomes.items() if each.outcome == "skip"}
    if backend == "gloo":
        assert not skipped, skipped
    return sum(each.outcome == "pass" for each in outcomes.values())


def test_a_selection_passes_behind_the_name_gloo() -> None:
    assert set(SELECTION) <= set(GLOO["3"])
    assert check(3, "gloo", SELECTION) == len(SELECTION)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.usefixtures("exhaustive")
def test_all_that_passes_for_gloo_passes_behind_its_name(ranks: int) -> None:
    tests = [name for name in GLOO[str(ranks)] if name not in EXCEPTIONS]
    assert check(ranks, "gloo", tests) == len(tests) >= 84


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.usefixtures("exhaustive")
def test_all_that_torch_lets_us_run_passes_by_our_own_name(ranks: int) -> None:
    assert check(ranks, "frogzmq", GLOO[str(ranks)]) >= BY_NAME[ranks]
