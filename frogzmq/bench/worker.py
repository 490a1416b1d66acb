"""One rank of the benchmark: ``python -m frogzmq.bench.worker SPEC`` with the env:// variables set.

All contenders live in the same processes, as groups beside a Gloo group that carries the benchmark's own
control. Every rank prints what it measured as lines of JSON behind a mark; ``collect`` puts them together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import frogzmq
from frogzmq.bench import probes
from frogzmq.bench.peers import bytes_sent, find_peer
from frogzmq.bench.spec import MARK, Layout, Spec, block_length, labels_of
from frogzmq.config import runtime_dir

TIMEOUT = timedelta(seconds=120)
_CHECK = 1 << 18
"""Elements that are compared at a time, so that checking needs no memory to speak of."""


@dataclass(frozen=True)
class Contender:
    """One backend's group. ``label`` differs even where two contenders are of one backend."""

    label: str
    backend: str
    group: Any


def say(kind: str, **values: object) -> None:
    """Tell the command."""
    sys.stdout.write(f"{MARK}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def pattern(numel: int) -> torch.Tensor:
    """Whole numbers 1..7, scaled down so that they stay finite through a block."""
    base = torch.arange(numel, dtype=torch.float32)
    return base.remainder_(7).add_(1).mul_(2.0**-20)


class Rank:
    """This rank's side of the benchmark."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.layout = Layout(spec.ranks, spec.peers)
        self.rank = dist.get_rank()
        self.host = self.layout.host_of(self.rank)
        self.first_here = self.layout.ranks_of(self.host)[0] == self.rank
        self.runtime_dir = runtime_dir()
        self.contenders = [
            Contender(label, backend, dist.new_group(backend=backend, timeout=TIMEOUT))
            for label, backend in zip(labels_of(spec.backends), spec.backends, strict=True)
        ]
        for contender in self.contenders:
            dist.all_reduce(torch.ones(1), group=contender.group)
        self.ports = self._exchange_ports()
        view = find_peer(self.runtime_dir) if self.first_here else None
        self.peer_pid = view.pid if view else 0
        arena = list(view.arena) if view else []
        say("ready", rank=self.rank, pid=os.getpid(), peer=self.peer_pid, arena=arena)
        dist.barrier()

    def _exchange_ports(self) -> dict[int, int]:
        """Which machine every TCP port of every rank belongs to."""
        mine = [local for local, _, _ in probes.tcp_sockets()]
        everyone: list[Any] = [None] * self.layout.ranks
        dist.all_gather_object(everyone, mine)
        return {port: self.layout.host_of(rank) for rank, ports in enumerate(everyone) for port in ports}

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank; also a barrier."""
        cell = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(cell, 0)
        dist.barrier()
        return float(cell.item())

    def cpu(self, contender: Contender) -> float:
        """CPU seconds so far of this rank and, on one rank per machine, of the contender's peer."""
        ours = contender.backend == "frogzmq" and self.peer_pid
        return time.process_time() + (probes.cpu_seconds(self.peer_pid) if ours else 0.0)

    def sent(self, contender: Contender) -> int:
        """Bytes so far from this machine to others that this rank answers for."""
        if self.layout.peers == 1:
            return 0
        if contender.backend != "frogzmq":
            return probes.sent_to(self.ports, self.host)
        view = find_peer(self.runtime_dir) if self.first_here else None
        return bytes_sent(view) if view else 0

    def block(
        self, contender: Contender, tensor: torch.Tensor, base: torch.Tensor, count: int
    ) -> dict[str, Any]:
        """One turn: ``count`` timed iterations back to back, after one that starts all ranks together."""
        group, clock = contender.group, time.perf_counter
        torch.mul(base, self.rank + 1, out=tensor)
        dist.barrier()
        sent, cpu, began = self.sent(contender), self.cpu(contender), time.monotonic()
        dist.all_reduce(tensor, group=group)
        stamps = [clock()]
        for _ in range(count):
            dist.all_reduce(tensor, group=group)
            stamps.append(clock())
        ended, cpu = time.monotonic(), self.cpu(contender) - cpu
        sent = self.sent(contender) - sent
        self.check(contender.label, tensor, base, count)
        return {
            "label": contender.label, "nbytes": tensor.numel() * 4, "host": self.host, "rank": self.rank,
            "began": began, "ended": ended, "cpu_s": cpu, "sent": sent,
            "iterations": [after - before for before, after in pairwise(stamps)],
        }  # fmt: skip

    def check(self, label: str, tensor: torch.Tensor, base: torch.Tensor, count: int) -> None:
        """Compare the whole tensor with what ``count + 1`` all_reduces must give; raise where it differs.

        Small whole numbers times powers of the rank count: exact for 2, 4 and 8 ranks.
        """
        ranks = self.layout.ranks
        factor = ranks * (ranks + 1) / 2 * float(ranks) ** count
        tolerance = 0.0 if ranks & (ranks - 1) == 0 else 1e-6 * (count + 1)
        for start in range(0, tensor.numel(), _CHECK):
            got, expected = tensor[start : start + _CHECK], base[start : start + _CHECK] * factor
            if not torch.allclose(got, expected, rtol=tolerance, atol=0.0):
                at = int(((got - expected).abs() > tolerance * expected).nonzero()[0])
                raise RuntimeError(
                    f"{label}: all_reduce of {tensor.numel() * 4} bytes is wrong on rank {self.rank}: "
                    f"element {start + at} is {got[at].item()}, expected {expected[at].item()}"
                )

    def cell(self, nbytes: int) -> None:
        """All turns at one size: warm up, agree on the length of turns, alternate until the time is over."""
        base = pattern(nbytes // 4)
        tensor = torch.empty_like(base)
        lengths: dict[str, int] = {}
        for contender in self.contenders:
            warm = [min(self.block(contender, tensor, base, 2)["iterations"]) for _ in range(2)]
            length = block_length(min(warm), self.spec.block_s, self.layout.ranks)
            lengths[contender.label] = int(self.agree(length))
        began, turn, over = time.monotonic(), 0, False
        while not over:
            # Who goes first changes every round: a block inherits caches and clock from the one before it.
            for contender in self.contenders[:: 1 if turn % 2 == 0 else -1]:
                say("block", **self.block(contender, tensor, base, lengths[contender.label]))
            turn += 1
            elapsed = time.monotonic() - began
            if self.rank == 0:
                say("progress", nbytes=nbytes, share=min(1.0, elapsed / self.spec.seconds), turns=turn)
            over = bool(self.agree(float(elapsed >= self.spec.seconds and turn >= 2)))


def run(spec: Spec) -> None:
    """Set up, measure every size, tear down."""
    torch.set_num_threads(1)
    if "frogzmq" in spec.backends:
        frogzmq._register_backend()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = Rank(spec)
    for nbytes in spec.sizes:
        rank.cell(nbytes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Spec.from_text(sys.argv[1]))
