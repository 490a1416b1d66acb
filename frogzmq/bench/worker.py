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
from frogzmq.bench.collectives import Case
from frogzmq.bench.peers import bytes_sent, find_peer
from frogzmq.bench.spec import MARK, Layout, Spec, block_length, labels_of
from frogzmq.config import runtime_dir

TIMEOUT = timedelta(seconds=120)


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

    def block(self, contender: Contender, case: Case, count: int) -> dict[str, Any]:
        """One turn: ``count`` timed iterations back to back, after one that starts all ranks together."""
        group, clock = contender.group, time.perf_counter
        case.fill()
        dist.barrier()
        sent, cpu, began = self.sent(contender), self.cpu(contender), time.monotonic()
        case.run(group)
        stamps = [clock()]
        for _ in range(count):
            case.run(group)
            stamps.append(clock())
        ended, cpu = time.monotonic(), self.cpu(contender) - cpu
        sent = self.sent(contender) - sent
        if case.spoils:
            case.fill()
            case.run(group)
        case.check(contender.label, 1 if case.spoils else count + 1)
        return {
            "label": contender.label, "collective": case.collective, "nbytes": case.nbytes,
            "host": self.host, "rank": self.rank, "began": began, "ended": ended, "cpu_s": cpu, "sent": sent,
            "iterations": [after - before for before, after in pairwise(stamps)],
        }  # fmt: skip

    def cell(self, collective: str, nbytes: int) -> None:
        """All turns of a cell: warm up, agree on the length of turns, alternate until the time is over."""
        case = Case(collective, nbytes, self.rank, self.layout.ranks)
        lengths: dict[str, int] = {}
        for contender in self.contenders:
            warm = [min(self.block(contender, case, 2)["iterations"]) for _ in range(2)]
            length = block_length(min(warm), self.spec.block_s, self.layout.ranks)
            lengths[contender.label] = int(self.agree(length))
        began, turn, over = time.monotonic(), 0, False
        while not over:
            # Who goes first changes every round: a block inherits caches and clock from the one before it.
            for contender in self.contenders[:: 1 if turn % 2 == 0 else -1]:
                say("block", **self.block(contender, case, lengths[contender.label]))
            turn += 1
            elapsed = time.monotonic() - began
            if self.rank == 0:
                share = min(1.0, elapsed / self.spec.seconds)
                say("progress", collective=collective, nbytes=nbytes, share=share, turns=turn)
            over = bool(self.agree(float(elapsed >= self.spec.seconds and turn >= 2)))


def run(spec: Spec) -> None:
    """Set up, measure every size, tear down."""
    torch.set_num_threads(1)
    if "frogzmq" in spec.backends:
        frogzmq._register_backend()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = Rank(spec)
    for collective, nbytes in spec.cells():
        rank.cell(collective, nbytes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Spec.from_text(sys.argv[1]))
