"""Jobs under torchrun, one launcher a machine: how users start them, and what is left when launchers die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from support.leftovers import living

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time
what, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
import torch
import torch.distributed as dist
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def tell(name):
    open(f"{out}/{name}.{rank}", "w").close()

if what == "startup":
    tell("begun")
    if rank == size - 1:
        time.sleep(600)
dist.init_process_group("frogzmq")
size_of = {"large": 16_000_000}.get(what, 1000)
t = torch.empty(size_of)
for step in range(steps):
    t.fill_(rank + step)
    dist.all_reduce(t)
    want = sum(range(size)) + size * step
    assert t[0] == t[-1] == want, (step, t[0], want)
    if step == (1 if what == "large" else 20):
        tell("running")
if what == "idle":
    tell("idle")
    time.sleep(600)
tell("done")
dist.destroy_process_group()
"""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Torchrun:
    """One job: a launcher on each of ``machines`` (runtime folders) with ``nproc`` ranks.

    A context manager: whatever still lives of it at the end is killed.
    """

    def __init__(
        self, tmp: Path, machines: Sequence[Path], nproc: int, port: int, what: str, steps: int = 1 << 30
    ) -> None:
        self.out = tmp / f"{what}{time.monotonic_ns()}"
        self.out.mkdir()
        self.machines, self.size = list(machines), nproc * len(machines)
        script = self.out / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.launchers = []
        for node, folder in enumerate(machines):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(machines)),
                "--node-rank", str(node), "--nproc-per-node", str(nproc), "--master-addr", "127.0.0.1",
                "--master-port", str(port), "--max-restarts", "0", "--monitor-interval", "0.1",
                str(script), what, str(self.out), str(steps),
            ]  # fmt: skip
            env = {k: v for k, v in os.environ.items() if not k.startswith(("FROGZMQ_", "TORCHELASTIC_"))}
            env |= {"PYTHONPATH": str(ROOT), "FROGZMQ_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
            with open(self.out / f"node{node}.log", "wb") as log:
                self.launchers.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.out)
                )

    def wait(self, what: str, seconds: float = 60.0, count: int | None = None) -> None:
        """Wait until all (or ``count``) ranks have told ``what``."""
        until = time.monotonic() + seconds
        while len(list(self.out.glob(f"{what}.*"))) < (self.size if count is None else count):
            assert all(launcher.poll() is None for launcher in self.launchers), self.text()
            assert time.monotonic() < until, f"not {what} after {seconds} s\n{self.text()}"
            time.sleep(0.02)

    def codes(self, seconds: float = 30.0) -> list[int]:
        """Wait for the launchers' ends."""
        until = time.monotonic() + seconds
        return [launcher.wait(max(0.1, until - time.monotonic())) for launcher in self.launchers]

    def signal(self, number: int, nodes: Sequence[int] = (0, 1)) -> None:
        """Send a signal to launchers (not to their ranks)."""
        for node in nodes:
            self.launchers[node].send_signal(number)

    def ranks(self) -> list[int]:
        """Processes of ranks that live."""
        return [pid for pid in living(self.machines) if _environment(pid).get("RANK") is not None]

    def text(self, node: int | None = None) -> str:
        """What a machine's launcher and ranks (or all) wrote."""
        nodes = range(len(self.machines)) if node is None else [node]
        return "\n".join((self.out / f"node{n}.log").read_text(errors="replace") for n in nodes)

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()
        for pid in self.ranks():
            os.kill(pid, signal.SIGKILL)


def _environment(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    # A peer that a rank has started has the rank's environment.
    if b"frogzmq.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
        return {}
    return dict(entry.partition("=")[::2] for entry in data.split("\0"))
