"""The examples as a user runs them: separate processes, each with its place in the environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from frogzmq.bench.launch import Ranks
from frogzmq.bench.spec import Layout

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE_S = 100
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def allreduce(layout: Layout, *arguments: str) -> list[str]:
    lines: list[str] = []
    command = [sys.executable, str(EXAMPLES / "allreduce.py"), "--elements", "100003", *arguments]
    with Ranks(layout, command, on_line=lambda rank, line: lines.append(line)) as ranks:
        ranks.wait(DEADLINE_S)
    return sorted(line for line in lines if line.startswith("rank "))


def train(tmp_path: Path, layout: Layout, *arguments: str) -> list[dict[str, Any]]:
    """What every rank wrote."""
    out = tmp_path / "rank-{rank}.json"
    script = str(EXAMPLES / "train_ddp.py")
    command = [sys.executable, script, "--epochs", "3", "--json", str(out), *arguments]
    with Ranks(layout, command) as ranks:
        ranks.wait(DEADLINE_S)
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(layout.ranks)]


def check_ranks_agree(outcomes: list[dict[str, Any]]) -> None:
    own = [outcome["parameter_hash"] for outcome in outcomes]
    assert len(set(own)) == 1
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in own)
    assert all(outcome["hashes"] == own for outcome in outcomes)
    assert len({outcome["held_out_loss"] for outcome in outcomes}) == 1
    # Ten digits: ln 10 = 2.3026 is the loss of guessing.
    assert 0 < outcomes[0]["held_out_loss"] < 2.0
    assert 0.2 < outcomes[0]["accuracy"] <= 1


@pytest.mark.parametrize("backend", ["gloo", "frogzmq"])
def test_allreduce_sums_on_every_rank(backend: str) -> None:
    lines = allreduce(Layout(2, 1), "--backend", backend)
    assert [line.split(",")[0] for line in lines] == [f"rank {r}/2: 100003 elements" for r in range(2)]
    assert all("sum 3.0 ok" in line for line in lines)


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    outcomes = train(tmp_path_factory.mktemp("gloo"), Layout(4, 2), "--backend", "gloo")
    check_ranks_agree(outcomes)
    return outcomes[0]


@pytest.mark.slow
@pytest.mark.parametrize("view", ["--bucket-view", "--no-bucket-view"])
def test_training_over_frogzmq_equals_gloo(tmp_path: Path, over_gloo: dict[str, Any], view: str) -> None:
    outcomes = train(tmp_path, Layout(4, 2), "--backend", "frogzmq", view)
    check_ranks_agree(outcomes)
    assert outcomes[0]["backend"] == "frogzmq"
    assert outcomes[0]["bucket_view"] is (view == "--bucket-view")
    assert outcomes[0]["held_out_loss"] == pytest.approx(over_gloo["held_out_loss"], abs=1e-4)
    assert outcomes[0]["steps"] == over_gloo["steps"] == 36


def test_training_with_a_file_for_rendezvous(tmp_path: Path) -> None:
    outcomes = train(tmp_path, Layout(2, 1), "--backend", "gloo", "--init", f"file://{tmp_path}/rendezvous")
    check_ranks_agree(outcomes)
    assert [outcome["rank"] for outcome in outcomes] == [0, 1]


def test_training_without_a_launch_says_how_to() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(EXAMPLES / "train_ddp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)
    assert done.returncode == 2
    assert "RANK and WORLD_SIZE not set: start this with torchrun" in done.stderr


def test_allreduce_is_short_enough_to_read() -> None:
    assert len((EXAMPLES / "allreduce.py").read_text().splitlines()) < 60


def test_the_variants_report_what_they_left_out() -> None:
    lines: list[str] = []
    command = [
        sys.executable,
        str(EXAMPLES / "variants.py"),
        "--steps",
        "24",
        "--slow",
        "0.02",
        "--every",
        "8",
    ]
    with Ranks(Layout(2, 1), command, on_line=lambda rank, line: lines.append(line)) as ranks:
        ranks.wait(DEADLINE_S)
    rows = {line.split(" ")[0]: line for line in lines}
    assert "24 steps" in rows["fresh_only"]
    assert rows["every_k(4)"].endswith("24 steps: 48 contributions used (100.0%), 0 skipped")
    assert rows["DiLoCo(8)"].endswith("4 steps: 8 contributions used (100.0%), 0 skipped")
    for name in ("DDP", "fresh_only", "every_k(4)", "DiLoCo(8)"):
        figures = re.search(r" s +(\d\.\d+) +(\d\.\d+)  ", rows[name])
        assert figures is not None, rows[name]
        assert 0 < float(figures[1]) < 2.5
