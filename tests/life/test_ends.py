"""A rank ends by an error, an interrupt or with its launcher: the others hear why, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleet import PeerProcess
from support.leftovers import living, wait_gone
from support.light import ROOT, LightJob, LightRank, repeated

from frogzmq.client import Client
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member

Machines = Callable[[int], list[Path]]
LIMIT_S = 10.0


def wait_for_the_last(me: LightRank, how: str) -> tuple[str, str, float]:
    """All but the last rank are inside an all_reduce which that one never calls."""
    import atexit

    group = me.join()
    me.all_reduce(group, np.ones(10, np.float32)).wait()
    if me.rank == me.size - 1:
        me.say("ready")
        if how == "exit handler":
            atexit.register(group.close)
        elif how == "interrupt":
            me.pause()
        elif how == "in the op":
            data = np.ones(10, np.float32)
            me.all_reduce(group, data).wait()
            me.say("waiting")
            me.all_reduce(group, data).wait()
        raise ValueError("label 7 of batch 5 is out of range")
    if how == "in the op":
        me.all_reduce(group, np.ones(10, np.float32)).wait()
        me.say("waiting")
        me.pause()
        me.all_reduce(group, np.ones(10, np.float32)).wait()  # the last rank had given what this needs
    return me.error_of(lambda: me.all_reduce(group, np.ones(10, np.float32)).wait())


def told(ranks: list[Any], since: float) -> list[str]:
    """What the ranks raised, all in time."""
    errors = [rank.finish(LIMIT_S + 5) for rank in ranks]
    assert [kind for kind, _, _ in errors] == ["RankLost"] * len(ranks)
    assert all(at - since < LIMIT_S for _, _, at in errors)
    return [text for _, text, _ in errors]


@repeated(20)
@pytest.mark.parametrize("how", ["plain", "exit handler"])
def test_c019_an_uncaught_error_reaches_all_ranks(
    job: LightJob, peers: list[PeerProcess], how: str, run: int
) -> None:
    ranks = job.start(wait_for_the_last, 4, peers, how, processes={3})
    ranks[3].expect("ready")
    begin = time.time()
    for text in told(ranks[:3], begin):
        assert "rank 3" in text
        assert "ValueError: label 7 of batch 5 is out of range" in text
    assert ranks[3].code(5) == 1
    assert "ValueError: label 7" in ranks[3].stderr
    assert time.time() - begin < 15


@repeated(20)
@pytest.mark.parametrize("how", ["interrupt", "in the op"])
def test_c021_an_interrupt_reaches_remote_ranks(
    job: LightJob, peers: list[PeerProcess], how: str, run: int
) -> None:
    ranks = job.start(wait_for_the_last, 2, peers, how, processes={1})
    ranks[1].expect("ready" if how == "interrupt" else "waiting")
    time.sleep(0.2)
    at = ranks[1].kill(signal.SIGINT)
    assert ranks[1].code(5) != 0
    ranks[0].go()
    (text,) = told(ranks[:1], at)
    assert "rank 1" in text
    assert "interrupted" in text


def forms_a_group(me: LightRank) -> tuple[str, str, float]:
    if me.rank == 1:
        me.say("late")
        me.pause()
    me.say("joining")
    return me.error_of(me.join)


@repeated(20)
def test_c021_interrupted_while_a_group_forms(job: LightJob, peers: list[PeerProcess], run: int) -> None:
    ranks = job.start(forms_a_group, 3, peers, processes={0})
    ranks[0].expect("joining")
    ranks[1].expect("late")
    time.sleep(0.3)
    at = ranks[0].kill(signal.SIGINT)
    assert ranks[0].code(5) != 0
    ranks[1].go()  # one that comes when the group has failed already
    for text in told(ranks[1:], at):
        assert "rank 0" in text
        assert "interrupted" in text


LAUNCHER = """
import os, subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", sys.argv[1], str(i), "2", sys.argv[2]]) for i in range(2)]
for child in children:
    child.wait()
"""

WORKER = """
import os, sys, time
import numpy as np
from support.light import BARRIER
from frogzmq.client import Client
from frogzmq.wire.messages import JoinGroup, GroupOptions, Member
rank, size, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
client = Client()
members = []
open(f"{out}/pid{rank}.tmp", "w").write(str(os.getpid()))
os.rename(f"{out}/pid{rank}.tmp", f"{out}/pid{rank}")
for other in range(size):
    while not os.path.exists(f"{out}/pid{other}"):
        time.sleep(0.01)
    pid = int(open(f"{out}/pid{other}").read())
    members.append(Member(rank=other, pid=pid, host="h", who=client.welcome.who))
gid = f"{int(members[0].pid):032x}"
group = client.join(JoinGroup(gid=gid, job="j", name="g", rank=rank, size=size, timeout_s=30,
                              options=GroupOptions(), members=members))
for step in range(int(os.environ["STEPS"])):
    group.post(BARRIER).wait()
    if step == 20:
        open(f"{out}/running{rank}", "w").close()
group.close()
"""


def launch(tmp: Path, folder: Path, steps: int) -> tuple[subprocess.Popen[bytes], Path]:
    """A launcher of two ranks, which say in the returned folder that they run."""
    out = tmp / f"launch{time.monotonic_ns()}"
    out.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("FROGZMQ_")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "FROGZMQ_RUNTIME_DIR": str(folder)}
    env |= {"TORCHELASTIC_RUN_ID": "none", "STEPS": str(steps)}
    with open(out / "log", "wb") as log:
        command = [sys.executable, "-c", LAUNCHER, WORKER, str(out)]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log), out


@repeated(20)
def test_c004_ranks_end_with_their_launcher_and_the_next_start_works(
    tmp_path: Path, machines: Machines, run: int
) -> None:
    (folder,) = machines(1)
    launcher, out = launch(tmp_path, folder, 1 << 30)
    until = time.monotonic() + 30
    while not all((out / f"running{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until, (out / "log").read_text()
        time.sleep(0.02)
    ranks = [int((out / f"pid{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + LIMIT_S
    while set(ranks) & set(living([folder])):
        assert time.monotonic() < until, (out / "log").read_text()
        time.sleep(0.02)
    # Both notice it by themselves, or one hears of the other.
    assert f"the launcher (process {launcher.pid}) has died" in (out / "log").read_text()
    time.sleep([0.0, 0.9, 1.0, 1.1, 1.2][run % 5])  # the first job's peer is about to end
    launcher, out = launch(tmp_path, folder, 25)
    assert launcher.wait(30) == 0, (out / "log").read_text()
    wait_gone([folder], 5.0)


def test_c004_a_rank_that_meets_a_peer_about_to_end_gets_the_next_one(machines: Machines) -> None:
    (folder,) = machines(1)
    with_rank = Client(folder)
    old = with_rank.welcome.pid
    member = Member(rank=0, pid=os.getpid(), host="h", who=with_rank.welcome.who)
    with_rank.join(
        JoinGroup(
            gid="ab" * 16, job="j", name="g", rank=0, size=1, timeout_s=20.0, options=GroupOptions(),
            members=[member],
        )
    ).close()  # fmt: skip
    with_rank.close()
    time.sleep(0.2)
    os.kill(old, signal.SIGSTOP)
    time.sleep(1.2)  # it has nobody for longer than it waits, but could not end yet
    found: list[Client] = []
    thread = threading.Thread(target=lambda: found.append(Client(folder)))
    thread.start()
    time.sleep(0.3)
    os.kill(old, signal.SIGCONT)
    thread.join(20)
    assert not thread.is_alive()
    new = found[0].welcome.pid
    assert found[0].peek()["process"]["pid"] == new != old
    found[0].close()
    os.kill(new, signal.SIGTERM)  # no rank ever came to it: it would wait for one


def test_c021_interrupted_while_it_starts_its_peer(tmp_path: Path, machines: Machines) -> None:
    (folder,) = machines(1)
    env = {k: v for k, v in os.environ.items() if not k.startswith("FROGZMQ_")}
    env |= {"PYTHONPATH": str(ROOT), "FROGZMQ_RUNTIME_DIR": str(folder)}
    code = "import frogzmq.client as c; print('begun', flush=True); c.Client(); import time; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"begun\n"
        until = time.monotonic() + 10
        while not set(living([folder])) - {rank.pid}:
            assert time.monotonic() < until
            time.sleep(0.005)
        rank.send_signal(signal.SIGINT)
        wait_gone([folder], 5.0)
