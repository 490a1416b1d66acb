"""Jobs over a real network: each machine is a network namespace, nothing is configured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fabrics import ZmqFabric
from support.fleet import ROOT, Fleet
from support.netns import Lan, refusal
from support.reference import reference

from frogzmq.descriptor import Descriptor
from frogzmq.types import Mode, OpKind, Order, ReduceOp
from frogzmq.wire import ranks

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
            holder = (
                (directory / "peer.lock").read_text().strip() if (directory / "peer.lock").exists() else ""
            )
            if holder and (directory / "peer.sock").exists():
                try:
                    os.kill(int(holder), signal.SIGKILL)
                except ProcessLookupError:
                    pass


@pytest.mark.torch
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_machines_whose_own_name_is_loopback_need_no_setting(lan: Lan, tmp_path: Path, size: int) -> None:
    job = Job(lan, tmp_path, size)
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


STRANGER = """
import sys, time, zmq
from frogzmq.wire import frames
from frogzmq.wire.messages import Hello, Identity
address, port, inner, pub, server_key = sys.argv[1:]
who = Identity(peer="00000000000000aa", instance="1-x", name="stranger", endpoints=[])
context = zmq.Context()
def caller(kind, port, curve):
    socket = context.socket(kind)
    socket.linger = 0
    if curve:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = curve
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    else:
        socket.identity = b"00000000000000aa:1-x:c"
    socket.connect(f"tcp://{address}:{port}")
    if kind != zmq.SUB:
        socket.send(frames.encode(Hello(who=who)))
    return socket
wrong = zmq.curve_keypair()[0]
sockets = {
    "unknown key": caller(zmq.DEALER, port, server_key.encode()),
    "another server's key": caller(zmq.DEALER, port, wrong),
    "no encryption": caller(zmq.DEALER, port, b""),
    "announcements": caller(zmq.SUB, pub, server_key.encode()),
    "plain announcements": caller(zmq.SUB, pub, b""),
    "machine-local port": caller(zmq.DEALER, inner, b""),
}
time.sleep(2.0)
print([name for name, socket in sockets.items() if socket.poll(0)])
context.destroy(linger=0)
"""


def all_reduce(count: int) -> Descriptor:
    return Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (count,))


def check_sum(fabric: ZmqFabric, count: int) -> None:
    """One all_reduce, exact."""
    rng = np.random.default_rng(count)
    world = len(fabric.placement)
    data = [rng.standard_normal(count).astype(np.float32).tobytes() for _ in range(world)]
    want = reference(all_reduce(count), data, [(rank,) for rank in range(world)], Order.MACHINE)
    assert fabric.run([(all_reduce(count), mine) for mine in data]) == [bytes(want)] * world


def test_three_machines_in_shard_mode_and_a_stranger_beside_them(lan: Lan, tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        peers = [fleet.start(before=lan.entering(number), ready=False) for number in range(3)]
        fabric = ZmqFabric([0, 1, 2], Mode.SHARD, Order.MACHINE, [peer.wait_ready() for peer in peers])
        try:
            me = peers[0].peek()
            ports = me["fabric"]
            arguments = [lan.address(0), *(str(ports[n]) for n in ("port", "local_port", "pub_port"))]
            command = [sys.executable, "-c", STRANGER, *arguments, me["me"]["key"]]
            stranger = subprocess.Popen(
                lan.command(2, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
            for count in (0, 1000, 700_001):
                check_sum(fabric, count)
            assert stranger.communicate(timeout=60)[0].strip() == "[]", "a stranger was answered"
            check_sum(fabric, 5000)
        finally:
            fabric.close()
        after = peers[0].peek()
        assert sorted(row["name"] for row in after["peers"]) == ["machine1", "machine2"]
        assert after["fabric"]["denied_keys"] >= 2
        assert after["counters"]["rejected_frames"] == 0
        assert all(link["encrypted"] for link in after["fabric"]["links"])
        assert "is not allowed here" in peers[0].text()


def test_secrecy_off_is_a_choice_of_all_machines(lan: Lan, tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        plain = [
            fleet.start(before=lan.entering(number), config='secrecy = "off"', ready=False)
            for number in range(2)
        ]
        fabric = ZmqFabric([0, 1], Mode.AUTO, Order.MACHINE, [peer.wait_ready() for peer in plain])
        try:
            check_sum(fabric, 300_000)
            links = plain[0].peek()["fabric"]["links"]
            assert [link["encrypted"] for link in links if link["up"]] == [False]
        finally:
            fabric.close()
        assert f"is up at tcp://{lan.address(1)}:" in plain[0].text()
        assert "(plain)" in plain[0].text()


@pytest.mark.slow
def test_an_address_that_cannot_be_reached_is_named(lan: Lan, tmp_path: Path) -> None:
    nowhere = "10.77.3.99"
    with Fleet(tmp_path) as fleet:
        one = fleet.start(before=lan.entering(0), ready=False)
        two = fleet.start(
            before=lan.entering(1), config=f'advertise = ["{nowhere}"]', name="beta", ready=False
        )
        started = time.monotonic()
        both = [one.wait_ready().local(), two.wait_ready().local()]
        for local in both:
            local.sock.settimeout(60)
        who = [local.welcome.who for local in both]
        both[0].join(0, who)  # the other machine never hears of the job, so it cannot call us either
        failed = both[0].expect(ranks.Failed)
        assert time.monotonic() - started < 40
        assert "beta" in failed.text
        assert f"tcp://{nowhere}:" in failed.text
        assert who[1].endpoints[0].startswith(f"tcp://{nowhere}:")
        print(failed.text)
