"""The project as its users meet it: what is in the wheel, what the README promises, what imports what."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import frogzmq
from frogzmq.config import VARIABLES, PeerConfig, load_config

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
SOURCES = sorted((ROOT / "frogzmq").rglob("*.py"))


# ------------------------------------------------------------------ what is published
def test_public_names_are_pinned() -> None:
    assert sorted(frogzmq.__all__) == [
        "Client", "ConfigError", "DeadlineExceeded", "DuplicateIdentity", "FrogError", "GroupBroken",
        "IntegrityError", "Mismatch", "Options", "PeerUnreachable", "RankLost", "StoreFull",
        "VersionMismatch", "WireError", "__version__", "compare_fingerprints", "compare_receipts",
        "fingerprint", "install", "receipts", "register",
    ]  # fmt: skip
    assert all(getattr(frogzmq, name) is not None for name in frogzmq.__all__)


def test_entry_points_name_what_exists() -> None:
    groups = PROJECT["project"]["entry-points"]
    for group in ("torch.backends", "torch.distributed.backends"):
        module, _, name = groups[group]["frogzmq"].partition(":")
        assert module == "frogzmq"
        assert callable(getattr(frogzmq, name))


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, frogzmq; print([m for m in ('torch', 'zmq', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    path = next(WheelBuilder(os.fspath(ROOT)).build(directory=os.fspath(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    info = f"frogzmq-{frogzmq.__version__}.dist-info/"
    assert [name for name in names if not name.startswith(("frogzmq/", info))] == []
    assert "frogzmq/py.typed" in names
    assert f"{info}licenses/LICENSE" in names
    packed = {name for name in names if name.endswith(".py")}
    assert packed == {os.fspath(path.relative_to(ROOT)) for path in SOURCES}


def test_the_version_is_written_once_and_has_a_changelog_entry() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert f"## {frogzmq.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        name, _, floor = requirement.partition(">=")
        assert floor, f"{requirement} has no lower bound"
        assert _numbers(pins[name.lower()]) >= _numbers(floor), requirement


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


# --------------------------------------------------------------------- what is promised
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_readmes_make_commands_exist() -> None:
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)\b", README, re.MULTILINE))
    assert {"demo", "test", "check", "bench"} <= named <= _targets()


def test_the_readmes_frogzmq_commands_exist() -> None:
    from typer.main import get_command

    from frogzmq.cli.main import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"`?frogzmq (peer|peek|bench|version|run|doctor|keygen)\b", README))
    assert named <= commands == {"peer", "peek", "bench", "version"}


def test_the_readme_starts_with_the_two_commands_and_the_one_line_change() -> None:
    first_screen = "\n".join(README.splitlines()[:26])
    for text in ["make demo", "make test", 'init_process_group("gloo")', 'init_process_group("frogzmq")']:
        assert text in first_screen


def test_the_readme_and_the_settings_agree() -> None:
    assert set(re.findall(r"^\| `(FROGZMQ_[A-Z_]+)`", README, re.MULTILINE)) == set(VARIABLES)
    assert set(re.findall(r"FROGZMQ_[A-Z]+(?:_[A-Z]+)*", README)) <= set(VARIABLES)
    table = (ROOT / "peers" / "README.md").read_text()
    keys = {
        key
        for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert keys == set(PeerConfig.model_fields)


@pytest.mark.parametrize("document", ["README.md", "peers/README.md"])
def test_links_in_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_makefile_targets_set_up_the_environment_by_themselves() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "check", "bench"):
        assert f"\n{target}: $(STAMP)\n" in text


@pytest.mark.parametrize("path", [".ci/run", "tools/peek"])
def test_scripts_are_executable(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)


# ----------------------------------------------------------------------- a fleet as data
@pytest.mark.parametrize("path", sorted((ROOT / "peers" / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_example_settings_can_be_read(path: Path) -> None:
    settings = load_config(path, {})
    assert settings.name
    assert settings != PeerConfig(name=settings.name)


def test_every_kind_of_example_is_there() -> None:
    assert {path.stem for path in (ROOT / "peers" / "examples").iterdir()} == {"lan", "wan", "metered"}


def test_the_service_unit_calls_a_real_command() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "peers" / "units" / "frogzmq-peer.service")
    service = unit["Service"]
    program, *args = service["ExecStart"].split()
    assert Path(program).name in PROJECT["project"]["scripts"]
    assert args == ["peer", "--config", "%h/.config/frogzmq/peer.toml"]
    assert service["RuntimeDirectoryMode"] == "0700"
    name, _, value = service["Environment"].partition("=")
    assert name in VARIABLES
    assert value == f"%t/{service['RuntimeDirectory']}"


# ----------------------------------------------------------------------- how it is built
def test_import_contracts_are_in_force() -> None:
    contracts = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
    assert set(contracts) == {"layers", "sans-io", "torch-at-the-top", "zmq-in-the-daemon"}
    assert contracts["layers"]["exhaustive"]
    layered = {name for layer in contracts["layers"]["layers"] for name in re.findall(r"\w+", layer)}
    modules = {path.stem for path in (ROOT / "frogzmq").glob("[a-z]*.py")}
    packages = {path.parent.name for path in (ROOT / "frogzmq").glob("*/__init__.py")}
    assert layered == modules | packages


@pytest.mark.parametrize(
    "module", ["proto.peer", "plan.strategy", "wire.frames", "content.receipt", "machine"]
)
def test_the_core_loads_no_sockets_threads_or_torch(module: str) -> None:
    code = (
        f"import sys, frogzmq.{module};"
        "print([m for m in ('zmq', 'torch', 'asyncio', 'frogzmq.daemon') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_modules_stay_small() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}


def test_functions_stay_small() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []


def test_every_module_says_what_it_is() -> None:
    assert [str(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))] == []
