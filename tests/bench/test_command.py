"""The command: its options, and a whole run of Gloo against itself (which needs no peer)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from frogzmq.bench.main import app, make_layouts, make_spec
from frogzmq.bench.micro import micro
from frogzmq.bench.spec import SIZES, Layout


def test_defaults_measure_the_five_sizes_against_gloo() -> None:
    spec = make_spec("", 8.0, "gloo,frogzmq")
    assert spec.sizes == SIZES == (4, 4096, 262144, 4194304, 67108864)
    assert spec.backends == ("gloo", "frogzmq")


def test_layouts_are_those_that_can_be() -> None:
    assert make_layouts("2,4", "1,2") == [Layout(2, 1), Layout(4, 1), Layout(2, 2), Layout(4, 2)]
    assert make_layouts("1,2", "2") == [Layout(2, 2)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--sizes", "3"], "multiple of 4"),
        (["--sizes", "4q"], "not understood"),
        (["--backends", "gloo"], "name two backends"),
        (["--ranks", "two"], "numbers separated by commas"),
        (["--ranks", "1", "--peers", "2"], "cannot be spread"),
        (["--ranks", "0"], "at least 1 rank"),
        (["--seconds", "0"], "above 0"),
    ],
)
def test_wrong_options_say_why(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert why in result.output


def test_the_option_is_named() -> None:
    with pytest.raises(typer.BadParameter) as caught:
        make_spec("4,5", 1.0, "gloo,frogzmq")
    assert caught.value.param_hint == "--sizes"


def test_micro_figures_are_rates() -> None:
    figures = micro(0.0)
    assert set(figures) == {"copy", "hash", "fold float32", "fold bfloat16", "fold float16"}
    assert all(0.001 < rate < 1000 for rate in figures.values())


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "frogzmq.bench", "--quick", "--json", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


def check_cells(layout: dict[str, Any], labels: list[str], sizes: list[int]) -> None:
    assert [cell["nbytes"] for cell in layout["cells"]] == sizes
    for cell in layout["cells"]:
        assert [figures["label"] for figures in cell["figures"]] == labels
        for figures in cell["figures"]:
            assert figures["count"] >= 2
            assert 0 < figures["p10_s"] <= figures["median_s"] <= figures["p90_s"] < 60
            assert figures["cpu_s_per_op"] > 0
            assert len(figures["sent_per_op"]) == layout["peers"]
        assert cell["ratio"] == pytest.approx(
            cell["figures"][0]["median_s"] / cell["figures"][-1]["median_s"]
        )


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_gloo_against_itself(tmp_path: Path) -> None:
    told = bench(tmp_path, "--backends", "gloo,gloo", "--ranks", "2", "--peers", "2", "--sizes", "4,1M")
    (layout,) = told["layouts"]
    check_cells(layout, ["gloo", "gloo#2"], [4, 1 << 20])
    # A ring of two sends half the tensor twice: the tensor, plus what is around it.
    for figures in layout["cells"][1]["figures"]:
        for sent in figures["sent_per_op"]:
            assert 1 << 20 <= sent < 1.05 * (1 << 20)
        assert figures["memory_bytes"] is None or figures["memory_bytes"] < 1 << 30
    # Two groups of one backend: no factor between them, however busy the machine (they alternate).
    assert 0.1 < layout["cells"][1]["ratio"] < 10


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_frogzmq_against_gloo_on_two_peers(tmp_path: Path) -> None:
    told = bench(tmp_path, "--ranks", "2", "--peers", "2", "--sizes", "4,1M")
    (layout,) = told["layouts"]
    check_cells(layout, ["gloo", "frogzmq"], [4, 1 << 20])
    frogzmq = layout["cells"][1]["figures"][1]
    # Each machine hands the other its contribution once.
    for sent in frogzmq["sent_per_op"]:
        assert 1 << 20 <= sent < 1.05 * (1 << 20)
    # A contribution and a result of 1 MiB on each machine, in shared memory.
    assert frogzmq["memory_bytes"] >= 4 << 20
    assert layout["peer_idle_bytes"] > 1 << 20


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_an_unknown_backend_is_an_error_that_names_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "frogzmq.bench", "--quick", "--backends", "gloo,nosuch", "--ranks", "1"]
    command += ["--peers", "1", "--sizes", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2
    assert "nosuch" in done.stdout
    assert "Traceback" not in done.stderr
