"""Collectives side by side: what each must give, worked out here by hand, and a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from frogzmq.bench.collect import Outcome
from frogzmq.bench.main import app, check_parts, make_spec
from frogzmq.bench.measure import Figures
from frogzmq.bench.report import as_json, layout_table
from frogzmq.bench.spec import COLLECTIVES, GIVES, Layout, Spec, tensor_bytes

UNIT = 2.0**-20
NAMES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
)  # fmt: skip


def test_eight_collectives_at_64_mib_unless_told() -> None:
    spec = make_spec("", 8.0, "gloo,frogzmq", collectives=True)
    assert spec.collectives == COLLECTIVES == NAMES
    assert spec.cells() == [(name, 64 << 20) for name in NAMES]
    assert make_spec("4,4k", 8.0, "gloo,frogzmq").cells() == [("all_reduce", 4), ("all_reduce", 4096)]
    assert Spec.from_text(spec.to_text()) == spec


def test_a_size_that_cannot_be_dealt_out_is_refused() -> None:
    spec = make_spec("48,36", 1.0, "gloo,frogzmq", collectives=True)
    check_parts(spec, [Layout(3, 1)])
    with pytest.raises(typer.BadParameter, match=r"36 bytes .* 4 ranks.*multiple of 16") as caught:
        check_parts(spec, [Layout(3, 1), Layout(4, 1)])
    assert caught.value.param_hint == "--sizes"
    check_parts(make_spec("36", 1.0, "gloo,frogzmq"), [Layout(4, 1)])


def test_the_command_says_so_before_it_starts_anything() -> None:
    result = CliRunner().invoke(app, ["--collectives", "--sizes", "4"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "multiple of 16" in result.output


@pytest.mark.parametrize(
    ("collective", "held"),
    [("all_reduce", 600), ("broadcast", 600), ("all_gather", 700), ("gather", 500), ("scatter", 500),
     ("reduce_scatter", 700), ("all_to_all", 900)],
)  # fmt: skip
def test_own_tensors_are_counted(collective: str, held: int) -> None:
    assert tensor_bytes(collective, 100, 3) == held


def outcome(sizes: tuple[int, ...], collectives: tuple[str, ...]) -> Outcome:
    cells = {
        (name, nbytes): [
            Figures(label, nbytes, 4, seconds, 0.5, 2.0, 1.0, 1.0, [0.0], None, collective=name)
            for label, seconds in (("gloo", 1.0), ("frogzmq", 0.5))
        ]
        for nbytes in sizes
        for name in collectives
    }
    return Outcome(Layout(4, 1), cells=cells)


def shown(told: Outcome) -> list[str]:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(layout_table(told))
    return captured.get().splitlines()


def test_the_table_names_collectives_and_puts_one_size_in_its_title() -> None:
    lines = shown(outcome((64 << 20,), NAMES))
    assert lines[0].startswith("collectives of 64 MiB, 4 ranks on 1 peer")
    assert [name for name in NAMES if any(line.split()[:2] == [name, "gloo"] for line in lines)] == list(
        NAMES
    )
    lines = shown(outcome((4, 4096), ("all_reduce",)))
    assert lines[0].startswith("all_reduce, 4 ranks on 1 peer")
    assert [line.split()[:3] for line in lines if "gloo" in line] == [
        ["4", "B", "gloo"],
        ["4", "KiB", "gloo"],
    ]


def test_json_names_the_collective_of_a_cell() -> None:
    spec = make_spec("4k", 1.0, "gloo,frogzmq", collectives=True)
    told = as_json(spec, [outcome((4096,), NAMES)], {}, 1.0)
    cells = told["layouts"][0]["cells"]
    assert [(cell["collective"], cell["nbytes"], cell["ratio"]) for cell in cells] == [
        (name, 4096, 2.0) for name in NAMES
    ]
    assert [figures["collective"] for figures in cells[1]["figures"]] == ["broadcast"] * 2


@pytest.mark.torch
@pytest.mark.parametrize(
    ("collective", "rank", "expected"),
    [
        ("all_reduce", 1, [18, 36, 54, 72, 90, 108]),  # two runs: 1 + 2 + 3 times, then three of those
        ("broadcast", 1, [1, 2, 3, 4, 5, 6]),
        ("reduce", 0, [6, 12, 18, 24, 30, 36]),
        ("reduce", 1, None),
        ("all_gather", 2, [1, 2, 2, 4, 3, 6]),
        ("gather", 0, [1, 2, 2, 4, 3, 6]),
        ("gather", 1, None),
        ("scatter", 1, [3, 4]),
        ("reduce_scatter", 2, [30, 36]),
        ("all_to_all", 1, [3, 4, 6, 8, 9, 12]),
    ],
)
def test_what_must_come_out(collective: str, rank: int, expected: list[int] | None) -> None:
    import torch

    from frogzmq.bench.collectives import Case

    case = Case(collective, 24, rank, 3)
    case.fill()
    runs = 1 if case.spoils else 2
    if expected is None:
        assert case.pieces(runs) == []
        return
    case.get.copy_(torch.tensor(expected) * UNIT)
    case.check("x", runs)
    for index in range(len(expected)):
        kept = case.get[index].clone()
        for wrong in (kept + UNIT, float("nan")):
            case.get[index] = wrong
            with pytest.raises(RuntimeError, match=rf"x: {collective} of 24 bytes .* element {index} "):
                case.check("x", runs)
        case.get[index] = kept


@pytest.mark.torch
@pytest.mark.parametrize("collective", NAMES)
def test_unset_outputs_never_pass(collective: str) -> None:
    from frogzmq.bench.collectives import Case

    case = Case(collective, 32, 1 if collective == "broadcast" else 0, 2)
    case.fill()
    with pytest.raises(RuntimeError, match="is wrong on rank"):
        case.check("x", 1)
    assert (case.get is case.give) == (GIVES[collective][1].name == "SAME")


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_a_run_measures_every_collective_of_both(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "frogzmq.bench", "--collectives", "--seconds", "0.2", "--sizes", "192k"]
    command += ["--ranks", "3", "--peers", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    (layout,) = told["layouts"]
    assert [(cell["collective"], cell["nbytes"]) for cell in layout["cells"]] == [
        (n, 192 << 10) for n in NAMES
    ]
    for cell in layout["cells"]:
        assert [figures["label"] for figures in cell["figures"]] == ["gloo", "frogzmq"]
        assert all(figures["count"] >= 2 and figures["median_s"] > 0 for figures in cell["figures"])
    # Ranks 0 and 1 share a machine: the root's tensor goes to the other one once, not once for each rank.
    broadcast = layout["cells"][1]["figures"][1]["sent_per_op"]
    assert 192 << 10 <= broadcast[0] < 1.1 * (192 << 10)
