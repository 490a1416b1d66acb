"""A sender that is far faster than its receiver: nothing is lost, and memory stays bounded."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fleet import ROOT, Fleet

GIGABYTE = 1 << 30

RANK = """
import json, os, sys
import numpy as np
from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire.messages import GroupOptions, Identity, JoinGroup, Member

rank, gid, small, large = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = Client(os.environ["FROGZMQ_RUNTIME_DIR"])
print(client.welcome.who.model_dump_json(), flush=True)
who = [Identity.model_validate(row) for row in json.loads(sys.stdin.readline())]
group = client.join(JoinGroup(
    gid=gid, job="", name="default", rank=rank, size=2, timeout_s=100.0, options=GroupOptions(),
    members=[Member(rank=r, pid=1, host="test", who=w) for r, w in enumerate(who)],
))

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))

sizes = [1024] * small + [262144] * large
tensors = [np.full(size, number % 997 + rank, np.float32) for number, size in enumerate(sizes)]
before = resident("VmRSS")
ops = []
for tensor in tensors:
    raw = tensor.view(np.uint8)
    shape = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", tensor.shape)
    ops.append(group.post(shape, raw, [raw]))
print("posted", flush=True)
sys.stdin.readline()
for op in ops:
    op.wait()
wrong = [n for n, tensor in enumerate(tensors) if not (tensor == 2 * (n % 997) + 1).all()]
print(json.dumps({"wrong": wrong[:10], "extra": resident("VmHWM") - before}), flush=True)
client.close()
"""


def start(rank: int, folder: Path, gid: str, small: int, large: int) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT), "FROGZMQ_RUNTIME_DIR": os.fspath(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), gid, str(small), str(large)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


def say(rank: subprocess.Popen[str], line: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line + "\n")
    rank.stdin.flush()


def hear(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    assert line, "the rank has ended"
    return line


def test_nothing_is_lost_while_the_receiver_is_stopped(fleet: Fleet, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("--repeats")
    small, large, pause_s = (10_000, 300, 10.0) if full else (1000, 40, 2.0)
    peers = [fleet.start(ready=False) for _ in range(2)]
    gid = secrets.token_hex(16)
    ranks = [start(n, peer.wait_ready().runtime_dir, gid, small, large) for n, peer in enumerate(peers)]
    try:
        who = [json.loads(hear(rank)) for rank in ranks]
        idle = peers[0].peek()["process"]["rss_bytes"]
        for rank in ranks:
            say(rank, json.dumps(who))
        assert hear(ranks[0]) == "posted\n"
        peers[1].process.send_signal(signal.SIGSTOP)
        try:
            most = 0
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                most = max(most, peers[0].peek()["process"]["rss_bytes"])
                time.sleep(0.2)
        finally:
            peers[1].process.send_signal(signal.SIGCONT)
        assert hear(ranks[1]) == "posted\n"
        for rank in ranks:
            say(rank, "wait")
        facts = [json.loads(hear(rank)) for rank in ranks]
        assert [fact["wrong"] for fact in facts] == [[], []]
        most = max(most, peers[0].peek()["process"]["rss_bytes"])
        print(f"beyond the tensors: rank {facts[0]['extra'] >> 20} MiB, peer {(most - idle) >> 20} MiB")
        assert facts[0]["extra"] + most - idle < GIGABYTE
        for peer in peers:
            counters = peer.peek()["counters"]
            assert counters["drops"] == 0, counters
            assert counters["rejected_chunks"] == 0
        assert [rank.wait(20) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()
