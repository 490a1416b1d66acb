"""Ranks here are plain Python: no torch, so that the launcher is tested and nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from frogzmq.bench.launch import RankFailed, Ranks
from frogzmq.bench.spec import Layout

SHOW = """
import os
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FROGZMQ_RUNTIME_DIR"
print("@".join(os.environ[name] for name in names))
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def run(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_ranks_get_their_places_and_lines_come_back() -> None:
    lines: dict[int, str] = {}
    with Ranks(Layout(4, 2), run(SHOW), on_line=lines.__setitem__) as ranks:
        folder = ranks.folder
        ranks.wait(60)
        dirs = [str(path) for path in ranks.runtime_dirs]
    assert [lines[rank] for rank in range(4)] == [
        f"0@4@0@2@{dirs[0]}", f"1@4@1@2@{dirs[0]}", f"2@4@0@2@{dirs[1]}", f"3@4@1@2@{dirs[1]}",
    ]  # fmt: skip
    assert not folder.exists()


def test_a_rank_that_fails_is_named_with_what_it_printed() -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('out of cheese')\ntime.sleep(600)"
    with pytest.raises(RankFailed) as caught, Ranks(Layout(2, 1), run(code)) as ranks:
        ranks.wait(60)
    text = str(caught.value)
    assert "rank 1 of 2 ranks on 1 peer ended with exit status 1" in text
    assert "out of cheese" in text
    assert not any(is_alive(process.pid) for process in ranks.processes)
    assert not ranks.folder.exists()


def test_a_signal_is_named() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RankFailed, match="signal SIGKILL"), Ranks(Layout(1, 1), run(code)) as ranks:
        ranks.wait(60)


def test_the_deadline_ends_ranks_that_hang() -> None:
    heard: list[str] = []
    with Ranks(Layout(1, 1), run(DEAF), on_line=lambda rank, line: heard.append(line)) as ranks:
        until = time.monotonic() + 60
        while not heard and time.monotonic() < until:
            time.sleep(0.02)
        with pytest.raises(RankFailed, match="has not ended after 1 s"):
            ranks.wait(1)
    assert heard == ["deaf"]
    assert not is_alive(ranks.processes[0].pid)


def test_nothing_is_left_when_the_caller_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt), Ranks(Layout(2, 2), run("import time; time.sleep(600)")) as ranks:
        raise KeyboardInterrupt
    assert not any(is_alive(process.pid) for process in ranks.processes)
    assert not ranks.folder.exists()


def test_peers_that_ranks_started_end_with_the_run() -> None:
    code = """
import time
from frogzmq.client.launch import connect
from frogzmq.config import runtime_dir
link = connect(runtime_dir())
print("connected", flush=True)
time.sleep(600)
"""
    heard: list[int] = []
    with Ranks(Layout(2, 2), run(code), on_line=lambda rank, line: heard.append(rank)) as ranks:
        until = time.monotonic() + 60
        while len(heard) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        peers = ranks.peers()
    assert sorted(heard) == [0, 1]
    assert [host for host, _ in peers] == [0, 1]
    assert len({view.pid for _, view in peers}) == 2
    assert not any(is_alive(view.pid) for _, view in peers)
    assert not any(Path(directory).exists() for _, view in peers for directory in view.arena)
