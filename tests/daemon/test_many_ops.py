"""Thousands of ops in a row leave no trace: the memory of ranks and peers is flat."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys

import pytest
from support.fleet import ROOT, Fleet

MEGABYTE = 1 << 20

RANK = """
import json, os, sys, time
import numpy as np
from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire.messages import GroupOptions, Identity, JoinGroup, Member

rank, gid, warm, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = Client(os.environ["FROGZMQ_RUNTIME_DIR"])
print(client.welcome.who.model_dump_json(), flush=True)
who = [Identity.model_validate(row) for row in json.loads(sys.stdin.readline())]
group = client.join(JoinGroup(
    gid=gid, job="", name="default", rank=rank, size=2, timeout_s=100.0, options=GroupOptions(),
    members=[Member(rank=r, pid=1, host="test", who=w) for r, w in enumerate(who)],
))
tensor = np.empty(16, np.float32)
raw = tensor.view(np.uint8)
shape = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (16,))

def resident():
    rows = [row.split() for row in open("/proc/self/status") if row.startswith(("RssAnon", "VmRSS"))]
    return min(int(row[1]) << 10 for row in rows)

for amount in (warm, count):
    started = time.monotonic()
    for number in range(amount):
        tensor[:] = number + rank
        group.post(shape, raw, [raw]).wait()
        assert (tensor == 2 * number + 1).all(), (number, tensor)
    peer = client.peek()
    print(json.dumps({
        "rank": resident(), "peer": peer["process"]["rss_bytes"] - peer["process"]["shared_bytes"],
        "open": peer["open_ops"], "drops": peer["counters"]["drops"],
        "each_s": (time.monotonic() - started) / amount,
    }), flush=True)
client.close()
"""


def start(rank: int, folder: os.PathLike[str], *arguments: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT), "FROGZMQ_RUNTIME_DIR": os.fspath(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


@pytest.mark.parametrize("machines", [[0, 0], [0, 1]], ids=["one peer", "two peers"])
def test_memory_is_flat(fleet: Fleet, machines: list[int], pytestconfig: pytest.Config) -> None:
    count = 10_000 if pytestconfig.getoption("--repeats") else 1500
    peers = [fleet.start(ready=False) for _ in range(max(machines) + 1)]
    gid = secrets.token_hex(16)
    ranks = [
        start(rank, peers[machine].wait_ready().runtime_dir, gid, 500, count)
        for rank, machine in enumerate(machines)
    ]
    try:
        who = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(who) + "\n")
            rank.stdin.flush()
        for rank in ranks:
            lines = rank.communicate(timeout=100)[0].splitlines()
            assert rank.returncode == 0, f"{lines}\n{fleet.logs()}"
            before, after = map(json.loads, lines)
            print(f"{machines}: {count} ops, {1e6 * after['each_s']:.0f} us each; {before} -> {after}")
            assert after["rank"] - before["rank"] < MEGABYTE
            assert after["peer"] - before["peer"] < 2 * MEGABYTE
            assert after["open"] <= 4
            assert after["drops"] == 0
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()
