"""A simulated fleet with ranks: what a test or a scenario talks to.

::

    cluster = Cluster([2, 1], seed="7")         # two machines with two ranks and one rank
    cluster.join()
    cluster.post_all(descriptor, [bytes(4)] * 3)
    cluster.run()
    cluster.results[0][1]                       # rank 0, op 1
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from blake3 import blake3

from frogzmq.content.manifest import tensor_root
from frogzmq.descriptor import Descriptor
from frogzmq.errors import FrogError, from_code
from frogzmq.machine import (
    Deliver,
    Fail,
    Joined,
    Note,
    RankConsumed,
    RankGot,
    RankJoined,
    RankLeft,
    RankPosted,
    RankReady,
)
from frogzmq.proto.settings import CoreSettings
from frogzmq.sim.driver import SimPeer
from frogzmq.sim.mail import PostOffice
from frogzmq.sim.network import LinkModel, Network
from frogzmq.sim.world import World
from frogzmq.types import ConnId, GroupId, Mode, Order, PeerId
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.messages import GroupOptions, JoinGroup, Member


class Cluster:
    """Peers ``A``, ``B``, ... with ranks numbered through, in one group."""

    def __init__(
        self,
        ranks_per_host: Sequence[int],
        *,
        seed: str = "0",
        link: LinkModel | None = None,
        settings: CoreSettings | None = None,
        mode: Mode = Mode.AUTO,
        order: Order = Order.MACHINE,
        receipts: bool = False,
        verify: bool = False,
        placement: Sequence[int] | None = None,
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world, link)
        self.checks = True
        self.consume_s = 1e-5
        """How long a rank takes to copy a large result out."""
        self.options = GroupOptions(mode=mode, order=order, receipts=receipts, verify=verify)
        self.mail = PostOffice(self)
        self.peers: dict[str, SimPeer] = {}
        for index in range(len(ranks_per_host)):
            name = chr(ord("A") + index)
            peer = PeerId(blake3(name.encode()).hexdigest()[:16])
            self.peers[name] = SimPeer(self, name, peer, settings or CoreSettings())
        hosts = list(self.peers.values())
        if placement is None:
            placement = [h for h, count in enumerate(ranks_per_host) for _ in range(count)]
        self.host_of = {rank: hosts[host] for rank, host in enumerate(placement)}
        self.size = len(placement)
        self.gid = GroupId(blake3(f"group {seed}".encode()).digest()[:16])
        self.results: dict[int, dict[int, bytes | None]] = {rank: {} for rank in self.host_of}
        self.verified: dict[int, list[int]] = {}
        """Ops of each rank that all machines were seen to agree on."""
        self.errors: dict[int, FrogError] = {}
        self.joined: dict[int, bool] = {}
        self.notes: list[str] = []
        self.seq = dict.fromkeys(self.host_of, 0)

    def at(self, endpoint: str) -> SimPeer | None:
        """The peer that listens there."""
        return self.peers.get(endpoint.removeprefix("tcp://").partition(":")[0])

    # ---------------------------------------------------------------------- ranks
    def join_request(self, rank: int, options: GroupOptions | None = None) -> JoinGroup:
        """What a rank tells its peer to take part."""
        members = [
            Member(rank=r, pid=1000 + r, host=peer.name, who=peer.me) for r, peer in self.host_of.items()
        ]
        return JoinGroup(
            gid=self.gid.hex(), job="sim", name="default", rank=rank, size=self.size, timeout_s=30.0,
            options=options or self.options, members=members,
        )  # fmt: skip

    def join(self, *, options: dict[int, GroupOptions] | None = None) -> None:
        """All ranks join; returns when the group is settled or has failed."""
        for rank, peer in self.host_of.items():
            join = self.join_request(rank, (options or {}).get(rank))
            peer.event(RankJoined(ConnId(rank), join))
        self.world.run(lambda: len(self.joined) + len(self.errors) >= self.size)

    def post(self, rank: int, descriptor: Descriptor, data: bytes, ready: int | None = None) -> int:
        """A rank calls its next op with ``data`` (ignored where it only receives); returns its number.

        ``ready``: how much of it can be read now (default: all; see ``more``).
        """
        self.seq[rank] += 1
        seq, peer = self.seq[rank], self.host_of[rank]
        size = 0 if descriptor.misfit(range(self.size)) else descriptor.gives(rank, self.size)
        if size:
            peer.plane.put_input(self.gid, seq, rank, np.frombuffer(bytearray(data), np.uint8))
        peer.event(RankPosted(self.gid, rank, seq, descriptor, size if ready is None else ready))
        return seq

    def more(self, rank: int, seq: int, ready: int) -> None:
        """The first ``ready`` bytes of what a rank gives can be read."""
        self.host_of[rank].event(RankReady(self.gid, rank, seq, ready))

    def post_all(
        self, descriptor: Descriptor, data: Sequence[bytes], delays_s: Sequence[float] | None = None
    ) -> int:
        """Every rank calls the op, each after its own delay."""
        for rank in self.host_of:
            delay = delays_s[rank] if delays_s else 0.0
            self.world.after(delay, partial(self._call, rank, descriptor, data[rank]))
        return self.seq[0] + 1

    def _call(self, rank: int, descriptor: Descriptor, data: bytes) -> None:
        self.post(rank, descriptor, data)

    def leave(self, rank: int, *, clean: bool = True, reason: str = "exited") -> None:
        """A rank goes."""
        self.host_of[rank].event(RankLeft(self.gid, rank, clean, reason))

    def run(self, seq: int | None = None, limit_s: float = 60.0) -> None:
        """Run until every rank has the result of ``seq`` (default: its latest) or an error."""

        def done() -> bool:
            if any(self.seq[r] < (seq or 0) and r not in self.errors for r in self.host_of):
                return False
            return all((seq or self.seq[r]) in self.results[r] or r in self.errors for r in self.host_of)

        self.world.run(done, limit_s)

    def idle(self, limit_s: float = 30.0) -> None:
        """Run until no peer holds an op."""
        alive = [peer for peer in self.peers.values() if peer.alive]
        self.world.run(lambda: not any(g.ops for p in alive for g in p.core.groups.values()), limit_s)

    def read(self, rank: int, seq: int, data: bytes) -> bytes:
        """What a rank has after it copied its result out; tests put faults here."""
        return data

    # ------------------------------------------------------------- what peers say
    def delivered(self, peer: SimPeer, effect: Deliver) -> None:
        """A rank's result grew or is complete."""
        if not effect.final:
            return
        if effect.upto < 0:
            self.results[effect.rank][effect.seq] = None
            return
        result = peer.plane.result(effect.gid, effect.seq, effect.rank)
        if result.inline is not None:
            data = result.inline
        else:
            whole = peer.plane.result_bytes(effect.gid, effect.seq)
            data = bytes(whole[result.off : result.off + result.total])
        data = self.results[effect.rank][effect.seq] = self.read(effect.rank, effect.seq, data)
        if self.options.witness:
            got = RankGot(effect.gid, effect.rank, effect.seq, tensor_root(np.frombuffer(data, np.uint8)))
            self.world.after(self.consume_s, lambda: peer.event(got))
        elif effect.upto > INLINE_BYTES:
            done = RankConsumed(effect.gid, effect.rank, effect.seq)
            self.world.after(self.consume_s, lambda: peer.event(done))

    def told(self, peer: SimPeer, effect: Joined | Fail | Note) -> None:
        """A rank is told that its group is complete, that it failed, or what is waited for."""
        if isinstance(effect, Joined):
            self.joined[effect.rank] = True
        elif isinstance(effect, Fail):
            self.errors.setdefault(effect.rank, from_code(effect.code, effect.text))
        else:
            self.notes.append(effect.text)
