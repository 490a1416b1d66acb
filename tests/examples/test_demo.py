"""What the demo concludes from what it saw; the demo itself is run by the slow test at the end."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("frogzmq_demo", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def outcome(digest: str = "ab" * 32, loss: float = 0.25) -> dict[str, Any]:
    return {"parameter_hash": digest, "held_out_loss": loss, "accuracy": 0.9, "elapsed_s": 1.0}


def run(demo: ModuleType, backend: str, outcomes: list[dict[str, Any]]) -> Any:
    return demo.Run(backend, "auto", 1.0, outcomes)


def test_equal_runs_pass(demo: ModuleType) -> None:
    runs = [
        run(demo, "frogzmq", [outcome(loss=0.25)] * 4),
        run(demo, "gloo", [outcome("cd" * 32, 0.25009)] * 4),
    ]
    assert demo.verdict(runs) == []


def test_a_rank_with_other_parameters_is_named(demo: ModuleType) -> None:
    runs = [run(demo, "frogzmq", [outcome()] * 3 + [outcome("cd" * 32)]), run(demo, "gloo", [outcome()] * 4)]
    (text,) = demo.verdict(runs)
    assert text.startswith("frogzmq: ranks ended with different parameters")
    assert "rank 3 cdcdcdcdcdcdcdcd" in text


@pytest.mark.parametrize("loss", [0.2502, float("nan")])
def test_losses_that_differ_are_named(demo: ModuleType, loss: float) -> None:
    runs = [run(demo, "frogzmq", [outcome(loss=loss)] * 4), run(demo, "gloo", [outcome()] * 4)]
    assert any("held-out losses differ" in text and "gloo 0.25000000" in text for text in demo.verdict(runs))


def test_ranks_that_got_different_losses_are_a_failure(demo: ModuleType) -> None:
    runs = [
        run(demo, "frogzmq", [outcome()] * 3 + [outcome(loss=0.25001)]),
        run(demo, "gloo", [outcome()] * 4),
    ]
    assert any("frogzmq: ranks got different held-out losses" in text for text in demo.verdict(runs))


def snapshot(*ops: dict[str, Any], key: str = "recent") -> dict[str, Any]:
    return {"groups": [{"gid": "aa", "mode": "auto", "order": "machine", key: list(ops)}]}


def op(seq: int, *ranks: list[int], what: str = "all_reduce(SUM) of float32[9]") -> dict[str, Any]:
    return {"seq": seq, "what": what, "observed": [{"ranks": each, "at_s": 0.1} for each in ranks]}


def test_orders_of_observation_are_collected_once_per_op(demo: ModuleType) -> None:
    observed = demo.Observed()
    observed.look(0, snapshot(op(1, [0], [1]), key="ops"))  # not complete: counts nothing yet
    observed.look(0, snapshot(op(1, [0], [1], [2, 3]), op(2, [2, 3], [1], [0])))
    observed.look(0, snapshot(op(2, [2, 3], [1], [0]), op(3, [0], [1], [2, 3])))
    observed.look(1, snapshot(op(1, [2], [3], [0, 1]), op(4, [0], what="broadcast of float32[9] root 0")))
    assert observed.orders(0) == [("0 > 1 > 2+3", 2), ("2+3 > 1 > 0", 1)]
    assert observed.orders(1) == [("2 > 3 > 0+1", 1)]
    assert observed.mode == "auto, order machine"


def test_a_snapshot_without_groups_is_fine(demo: ModuleType) -> None:
    observed = demo.Observed()
    observed.look(0, {})
    assert observed.orders(0) == []


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_ends_well() -> None:
    command = [sys.executable, str(TOOL), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ranks hold the same parameters" in done.stdout
    assert re.search(r" of [1-9]\d* ops", done.stdout), done.stdout
