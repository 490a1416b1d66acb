"""Peers, ranks and runtime folders for tests of how jobs start, end and die."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fleet import Fleet, PeerProcess
from support.leftovers import is_idle, nothing_left, wait_gone
from support.light import LightJob
from support.ranks import machine_dirs

IDLE_S = 10.0
"""How soon after a job's end, whatever it was, nothing of it is left in a peer."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked by ``repeated`` get their ``run``."""
    least, most = getattr(metafunc.function, "repeats", (1, 1))
    if "run" in metafunc.fixturenames:
        more = range(least, most) if metafunc.config.getoption("--repeats") else ()
        runs = [*range(least), *(pytest.param(run, marks=pytest.mark.slow) for run in more)]
        metafunc.parametrize("run", runs)


@pytest.fixture(scope="package")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PeerProcess]]:
    """Two machines' peers that serve the jobs of all tests, as they do in life."""
    with Fleet(tmp_path_factory.mktemp("peers")) as fleet:
        two = [fleet.start(name=name, ready=False) for name in ("alpha", "beta")]
        yield [peer.wait_ready() for peer in two]


@pytest.fixture
def peers(long_lived: list[PeerProcess]) -> Iterator[list[PeerProcess]]:
    """The two peers; after every test they must live and hold nothing of any job."""
    yield long_lived
    for peer in long_lived:
        assert peer.process.poll() is None, peer.text()[-4000:]
        peer.wait_for(is_idle, IDLE_S)


@pytest.fixture
def job(tmp_path: Path, peers: list[PeerProcess]) -> Iterator[LightJob]:
    """Torch-free ranks; none is left at the end (``peers`` is checked after them)."""
    with LightJob(tmp_path) as job:
        yield job


@pytest.fixture
def machines() -> Iterator[Callable[[int], list[Path]]]:
    """``machines(n)``: runtime folders whose peers the ranks start; all must have ended, and cleaned up."""
    made: list[Path] = []

    def make(count: int) -> list[Path]:
        made.extend(machine_dirs(count))
        return made[-count:]

    yield make
    try:
        wait_gone(made, 5.0)
        for folder in made:
            nothing_left(folder)
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
