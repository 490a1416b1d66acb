"""Jobs over a real network: each machine is a network namespace, nothing is configured."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from support.fabrics import ZmqFabric
from support.fleet import ROOT, Fleet
from support.netns import Lan, refusal
from support.reference import reference

from frogzmq.descriptor import Descriptor
from frogzmq.types import Mode, OpKind, Order, ReduceOp
from frogzmq.wire import frames
from frogzmq.wire.messages import Hello, Identity

pytestmark = pytest.mark.netns

RANK = """
import hashlib, os, socket, sys, time
import torch, torch.distributed as dist
import frogzmq
torch.set_num_threads(1)
started = time.monotonic()
dist.init_process_group("frogzmq")
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.arange(262144, dtype=torch.float32) + rank
dist.all_reduce(tensor)
want = size * torch.arange(262144, dtype=torch.float32) + sum(range(size))
assert torch.equal(tensor, want), (tensor[:4], want[:4])
digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
print("own name is", socket.gethostbyname(socket.gethostname()), flush=True)
print("done", digest, f"{time.monotonic() - started:.2f} s", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _permitted() -> None:
    if refusal():
        pytest.skip(refusal())


@pytest.fixture
def lan() -> Iterator[Lan]:
    """Three machines."""
    with Lan(3) as lan:
        yield lan


class Job:
    """A launch as torchrun does it: one rank per machine, told of the master by the environment."""

    def __init__(self, lan: Lan, folder: Path, size: int, **env: str) -> None:
        self.dirs = [folder / f"r{rank}" for rank in range(size)]
        self.processes = []
        (folder / "rank.py").write_text(RANK)
        for rank, directory in enumerate(self.dirs):
            directory.mkdir(mode=0o700)
            child = {name: text for name, text in os.environ.items() if not name.startswith("FROGZMQ_")}
            child |= {
                "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": lan.address(0),
                "MASTER_PORT": "29511", "FROGZMQ_RUNTIME_DIR": os.fspath(directory), "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.fspath(ROOT), **env,
            }  # fmt: skip
            with open(directory / "out", "wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        lan.command(rank, [sys.executable, os.fspath(folder / "rank.py")], folder),
                        stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=child,
                    )
                )  # fmt: skip

    def text(self) -> str:
        """Everything that ranks and peers wrote."""
        files = [directory / name for directory in self.dirs for name in ("out", "peer.log")]
        return "\n".join(f"--- {f.parent.name}/{f.name}\n{f.read_text()}" for f in files if f.exists())

    def log(self, rank: int) -> str:
        """What the peer that rank ``rank`` started wrote."""
        return (self.dirs[rank] / "peer.log").read_text()

    def finish(self, seconds: float) -> list[str]:
        """Wait for all ranks and for the peers that they started; the output of each rank."""
        until = time.monotonic() + seconds
        try:
            codes = [process.wait(max(0.1, until - time.monotonic())) for process in self.processes]
            assert codes == [0] * len(codes), self.text()
            while any((directory / "peer.sock").exists() for directory in self.dirs):
                assert time.monotonic() < until, f"a peer is left\n{self.text()}"
                time.sleep(0.05)
        finally:
            self.end()
        return [(directory / "out").read_text() for directory in self.dirs]

    def end(self) -> None:
        """Kill what is left: ranks, and peers by the number in their lock."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for directory in self.dirs:
            holder = (directory / "peer.lock").read_text().strip() if (directory / "peer.lock").exists() else ""
            if holder and (directory / "peer.sock").exists():
                try:
                    os.kill(int(holder), signal.SIGKILL)
                except ProcessLookupError:
                    pass


@pytest.mark.torch
@pytest.mark.parametrize("size", [2, 3])
def test_machines_whose_own_name_is_loopback_need_no_setting(lan: Lan, tmp_path: Path, size: int) -> None:
    job = Job(lan, tmp_path, size, FROGZMQ_MODE="shard")
    out = job.finish(60)
    digests = set()
    for text in out:
        assert "own name is 127.0.1.1" in text
        digests.add(text.split("done ")[1].split()[0])
    assert len(digests) == 1
    for rank in range(size):
        log = job.log(rank)
        others = [lan.address(other) for other in range(size) if other != rank]
        assert f"ready: tcp://{lan.address(rank)}:" in log
        for other in others:
            assert f"is up at tcp://{other}:" in log
        assert log.count("(encrypted)") == len(others)
        assert "127.0.1.1" not in log
