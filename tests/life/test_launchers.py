"""torchrun dies or is interrupted: no process of the job stays, and the next start works at once.

One test by default, the others with ``--repeats``: each starts six programs that import torch. What they
show of frogzmq alone is shown without torch in ``test_ends``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leftovers import wait_gone
from support.light import repeated
from support.torchrun import Torchrun, free_port

pytestmark = pytest.mark.torch
Machines = Callable[[int], list[Path]]

ORPHANS_S = 10.0
"""Ranks end this soon after their launcher."""
INTERRUPT_S = 5.0


@pytest.fixture
def nproc(pytestconfig: pytest.Config) -> int:
    """Ranks on each machine: torch takes two seconds to import, so one unless it is asked for."""
    return 2 if pytestconfig.getoption("--repeats") else 1


def wait_ranks_gone(job: Torchrun, seconds: float) -> None:
    until = time.monotonic() + seconds
    while job.ranks():
        assert time.monotonic() < until, f"ranks {job.ranks()} live after {seconds} s\n{job.text()}"
        time.sleep(0.02)


@repeated(20, 0)
def test_c004_launchers_are_killed_and_the_next_start_works(
    tmp_path: Path, machines: Machines, nproc: int, run: int
) -> None:
    folders, port = machines(2), free_port()
    with Torchrun(tmp_path, folders, nproc, port, "small") as job:
        job.wait("running")
        job.signal(signal.SIGKILL)
        wait_ranks_gone(job, ORPHANS_S)
        text = job.text()
    assert "the launcher" in text
    assert "has died" in text
    # At once: the first job's peers may be about to end.
    with Torchrun(tmp_path, folders, nproc, port, "small", 25) as again:
        assert again.codes(60) == [0, 0], again.text()
        assert len(list(again.out.glob("done.*"))) == again.size


@repeated(20)
def test_c021_interrupted_in_the_middle_of_an_op(
    tmp_path: Path, machines: Machines, nproc: int, run: int
) -> None:
    folders = machines(2)
    with Torchrun(tmp_path, folders, nproc, free_port(), "large") as job:
        job.wait("running")
        time.sleep(0.05 * (run % 10))
        job.signal(signal.SIGINT, [0])
        wait_gone([folders[0]], INTERRUPT_S, but=[job.launchers[0].pid])  # its own end is torch's affair
        wait_gone([folders[1]], 10.0, but=[job.launchers[1].pid])
        assert all(job.codes(30)), job.text()
        assert "interrupted" in job.text(1)
        assert "rank 0" in job.text(1) or "rank 1" in job.text(1)


@repeated(20, 0)
def test_c021_interrupted_while_it_waits_to_start(tmp_path: Path, machines: Machines, run: int) -> None:
    folders = machines(1)
    with Torchrun(tmp_path, folders, 2, free_port(), "startup") as job:
        job.wait("begun")
        time.sleep(1.0)  # rank 0 is in init_process_group
        job.signal(signal.SIGINT, [0])
        wait_gone(folders, INTERRUPT_S)


@repeated(20, 0)
def test_c021_interrupted_while_idle(tmp_path: Path, machines: Machines, nproc: int, run: int) -> None:
    folders = machines(2)
    with Torchrun(tmp_path, folders, nproc, free_port(), "idle", 21) as job:
        job.wait("idle")
        job.signal(signal.SIGINT, [0])
        wait_gone([folders[0]], INTERRUPT_S)
        job.signal(signal.SIGINT, [1])
        wait_gone([folders[1]], INTERRUPT_S)
