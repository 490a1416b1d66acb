"""Containers give /dev/shm 64 MB, or 16: a peer and its ranks work all the same, with one warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fleet import ROOT

SCRIPT = """
import os, sys, threading
from pathlib import Path
import numpy as np
from support.fleet import Fleet
from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member

COUNT = 64 << 20  # 256 MiB of float32
descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (COUNT,))
room = os.statvfs("/dev/shm")
print("room", room.f_blocks * room.f_frsize, flush=True)
failures = []
base = np.resize(np.arange(1000, dtype=np.float32), COUNT)

def rank(number, client, members):
    try:
        group = client.join(JoinGroup(
            gid="ab" * 16, job="", name="default", rank=number, size=2, timeout_s=100.0,
            options=GroupOptions(), members=members,
        ))
        tensor = np.empty(COUNT, np.float32)
        for step in range(3):
            np.add(base, number + step, out=tensor)
            raw = tensor.view(np.uint8)
            group.post(descriptor, raw, [raw]).wait()
            assert np.array_equal(tensor, 2 * base + (1 + 2 * step)), (number, step)
    except BaseException as error:
        failures.append(repr(error))

with Fleet(Path(sys.argv[1])) as fleet:
    peer = fleet.start()
    clients = [Client(peer.runtime_dir) for _ in range(2)]
    members = [Member(rank=r, pid=os.getpid(), host="test", who=c.welcome.who) for r, c in enumerate(clients)]
    threads = [threading.Thread(target=rank, args=(r, c, members)) for r, c in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arena = peer.peek()["arena"]
    for client in clients:
        client.close()
    print("failures", failures, flush=True)
    print("warnings", peer.text().count("WARNING"), flush=True)
    print("arena", arena, flush=True)
print("left", os.listdir("/dev/shm"), flush=True)
"""


def can_mount() -> bool:
    """Whether this user may have a private /dev/shm."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m none /dev/shm"],
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="a private /dev/shm needs root (unshare --mount)")
@pytest.mark.parametrize("megabytes", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_two_ranks_reduce_256_mb_where_shared_memory_is_tiny(tmp_path: Path, megabytes: int) -> None:
    mount = f"mount -t tmpfs -o size={megabytes}m none /dev/shm"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, "-c", SCRIPT, os.fspath(tmp_path)],
        capture_output=True, text=True, env=env, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"room {megabytes << 20}" in done.stdout
    assert "failures []" in done.stdout, done.stdout
    assert "warnings 1\n" in done.stdout, done.stdout
    assert "left []" in done.stdout, done.stdout
