"""One face for both fabrics, so that one conformance suite runs on the simulated and the real one.

``SimFabric`` runs the core under a virtual clock; ``ZmqFabric`` uses real peers and real (torch-free)
rank connections, one thread for each rank.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from support.fleet import PeerProcess

from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.errors import FrogError
from frogzmq.sim.cluster import Cluster
from frogzmq.types import Mode, Order
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member

WAIT_S = 30.0
Result = bytes | None | FrogError
"""What a rank gets: its bytes, nothing (by right), or an error."""


class Fabric(Protocol):
    """Ranks on machines, in one group."""

    placement: list[int]

    def run(self, calls: Sequence[tuple[Descriptor, bytes] | None]) -> list[Result]:
        """Every rank makes its call (None: it does not) and waits; returns what each got."""
        ...

    def leave(self, rank: int, reason: str) -> None:
        """A rank fails with a reason."""
        ...

    def die(self, rank: int) -> None:
        """A rank is gone without a word."""
        ...

    def close(self) -> None:
        """Take everything down."""
        ...


class SimFabric:
    """The simulated arm."""

    def __init__(self, placement: list[int], mode: Mode, order: Order) -> None:
        self.placement = placement
        hosts = [placement.count(h) for h in range(max(placement) + 1)]
        self.cluster = Cluster(hosts, mode=mode, order=order, placement=placement, seed="contract")
        self.cluster.join()
        self.gone: set[int] = set()

    def run(self, calls: Sequence[tuple[Descriptor, bytes] | None]) -> list[Result]:
        cluster = self.cluster
        wait_for = []
        for rank, call in enumerate(calls):
            if call is not None:
                cluster.post(rank, *call)
                wait_for.append(rank)

        def done() -> bool:
            return all(r in cluster.errors or cluster.seq[r] in cluster.results[r] for r in wait_for)

        cluster.world.run(done, WAIT_S)
        cluster.world.advance(0.5)
        return [
            cluster.errors.get(rank, cluster.results[rank].get(cluster.seq[rank]))
            if cluster.seq[rank] not in cluster.results[rank]
            else cluster.results[rank][cluster.seq[rank]]
            for rank in range(len(calls))
        ]

    def leave(self, rank: int, reason: str) -> None:
        self.cluster.leave(rank, clean=False, reason=reason)
        self.cluster.world.advance(0.5)

    def die(self, rank: int) -> None:
        self.leave(rank, "died without saying goodbye")

    def close(self) -> None:
        pass


class ZmqFabric:
    """The real arm: ``machines`` are running peers, ranks are connections with a thread each."""

    def __init__(
        self, placement: list[int], mode: Mode, order: Order, machines: Sequence[PeerProcess]
    ) -> None:
        self.placement = placement
        self.machines = machines
        self.clients: list[Client] = []
        try:
            self._start(mode, order)
        except BaseException:
            self.close()
            raise

    def _start(self, mode: Mode, order: Order) -> None:
        for host in self.placement:
            self.clients.append(Client(runtime_dir=self.machines[host].runtime_dir))
        members = [
            Member(rank=rank, pid=os.getpid(), host="test", who=client.welcome.who)
            for rank, client in enumerate(self.clients)
        ]
        gid = secrets.token_hex(16)
        joins = [
            JoinGroup(
                gid=gid, job="test", name="default", rank=rank, size=len(members), timeout_s=WAIT_S,
                options=GroupOptions(mode=mode, order=order), members=members,
            )
            for rank in range(len(members))
        ]  # fmt: skip
        self.groups = self._each(
            [lambda c=c, j=j: c.join(j) for c, j in zip(self.clients, joins, strict=True)]
        )
        failed = [group for group in self.groups if isinstance(group, FrogError)]
        assert not failed, f"{failed}\n{self._logs()}"

    def _logs(self) -> str:
        return "\n".join(f"--- {machine.log.name}\n{machine.text()}" for machine in self.machines)

    def _each(self, actions: Sequence[Callable[[], object] | None]) -> list:
        results: list = [None] * len(actions)

        def work(index: int, action: Callable[[], object]) -> None:
            try:
                results[index] = action()
            except FrogError as error:
                results[index] = error

        threads = [
            threading.Thread(target=work, args=(index, action), daemon=True)
            for index, action in enumerate(actions)
            if action is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S + 10)
            assert not thread.is_alive(), f"a rank hangs\n{self._logs()}"
        return results

    def _call(self, rank: int, descriptor: Descriptor, data: bytes) -> Result:
        world = len(self.placement)
        gives, gets = descriptor.gives(rank, world), descriptor.gets(rank, world)
        sink = np.zeros(max(gets, 0), np.uint8)
        src = np.frombuffer(data, np.uint8) if gives else None
        op = self.groups[rank].post(descriptor, src, [sink] if gets >= 0 else [])
        op.wait(WAIT_S)
        return sink.tobytes() if gets >= 0 else None

    def run(self, calls: Sequence[tuple[Descriptor, bytes] | None]) -> list[Result]:
        return self._each(
            [
                None if call is None else (lambda r=rank, c=call: self._call(r, *c))
                for rank, call in enumerate(calls)
            ]
        )

    def leave(self, rank: int, reason: str) -> None:
        self.clients[rank].close(clean=False, reason=reason)

    def die(self, rank: int) -> None:
        self.clients[rank].abandon()

    def close(self) -> None:
        for client in self.clients:
            client.close()
