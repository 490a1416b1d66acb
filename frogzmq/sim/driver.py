"""One simulated peer: the production core and data plane, with the network of ``sim.network``.

It does what the daemon's loop does, with virtual time in place of sockets and threads: real bytes are
folded and hashed, so results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from frogzmq.content.chunks import digest_chunk
from frogzmq.dataplane.plane import DataPlane
from frogzmq.machine import (
    Attach,
    ChunkReceived,
    ChunkRejected,
    CloseGroup,
    CloseOp,
    Deliver,
    Dial,
    Effect,
    Event,
    Fail,
    Fold,
    Folded,
    FoldSolo,
    Hangup,
    Joined,
    LinkDown,
    LinkReceived,
    LinkUp,
    MakePart,
    Note,
    OpenOp,
    PartMade,
    PeerDown,
    PeerUp,
    Publish,
    Received,
    Reply,
    Send,
    SendChunk,
    SendLink,
    Tick,
    Verified,
    Witness,
    Witnessed,
)
from frogzmq.proto.peer import PeerCore
from frogzmq.proto.settings import CoreSettings
from frogzmq.sim.mail import SimMail
from frogzmq.types import OpKind, PeerId, Role
from frogzmq.wire.frames import encode
from frogzmq.wire.messages import ChunkHeader, Identity, Message

if TYPE_CHECKING:
    from frogzmq.sim.cluster import Cluster

CHUNK_HEAD_BYTES = 128
WORK_S = 2e-5
"""Virtual time that folding or hashing one chunk takes."""


class SimPeer:
    """A peer in the simulated world."""

    def __init__(self, cluster: Cluster, name: str, peer: PeerId, settings: CoreSettings) -> None:
        self.cluster, self.world, self.network = cluster, cluster.world, cluster.network
        self.name, self.id, self.endpoint = name, peer, f"tcp://{name}:1"
        self.starts = 0
        self.settings = settings
        self.alive = False
        self._calls: dict[type[Effect], Callable[[Any], None]] = {
            Dial: self._dial, Hangup: self._hangup, Attach: self._attach, SendLink: self._send_link,
            Reply: self._reply, Send: self._send, SendChunk: self._send_chunk, OpenOp: self._open,
            MakePart: self._make_part, Fold: self._fold,
            Witness: self._witness, Verified: self._verified,
            FoldSolo: self._fold_solo, CloseOp: self._close, Deliver: self._deliver,
            Joined: self._rank, Fail: self._rank, Note: self._rank, Publish: self._publish,
            CloseGroup: self._ignore, PeerUp: self._ignore, PeerDown: self._ignore,
        }  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start, or start again with a new instance."""
        self.starts += 1
        instance = f"{self.name}.{self.starts}"
        self.me = Identity(
            peer=self.id, instance=instance, name=self.name, endpoints=[self.endpoint], python="", version=""
        )
        self.core = PeerCore(self.me, self.settings, self.world.rng(f"peer {instance}"))
        self.plane = DataPlane(None)
        self.mail = SimMail(self)
        self._calls |= self.mail.calls
        self.attached: dict[PeerId, str] = {}
        self.dialled: dict[str, bool] = {}
        self.alive = True
        self._wake_at = float("inf")

    def kill(self) -> None:
        """Stop without a word; other ends of its links see them go down."""
        self.alive = False
        for other in self.cluster.peers.values():
            other.lost(self.endpoint, "connection closed")

    # -------------------------------------------------------------------- events
    def event(self, event: Event) -> None:
        """Give the core an event and carry out what it says."""
        if not self.alive:
            return
        self.world.note(f"{self.name} {event!r}"[:400])
        effects = self.core.handle(event, self.world.now)
        if self.cluster.checks:
            self.core.check()
        for effect in effects:
            self._calls[type(effect)](effect)
        self._sleep()

    def _sleep(self) -> None:
        deadline = self.core.deadline
        if deadline < self._wake_at and deadline != float("inf"):
            self._wake_at = deadline
            starts = self.starts
            self.world.after(deadline - self.world.now, lambda: self._wake(starts))

    def _wake(self, starts: int) -> None:
        if self.alive and starts == self.starts:
            self._wake_at = float("inf")
            if self.core.deadline <= self.world.now:
                self.event(Tick())
            else:
                self._sleep()

    def _soon(self, delay_s: float, event: Event) -> None:
        starts = self.starts
        self.world.after(delay_s, lambda: self.event(event) if starts == self.starts else None)

    # --------------------------------------------------------------------- links
    def _dial(self, effect: Dial) -> None:
        self.dialled[effect.endpoint] = False
        self._try(effect.endpoint)

    def _try(self, endpoint: str) -> None:
        if not self.alive or endpoint not in self.dialled or self.dialled[endpoint]:
            return
        other = self.cluster.at(endpoint)
        delay = 2 * self.network.default.delay_s
        if other is not None and other.alive and not self.network.is_cut(self.name, other.name):
            self.dialled[endpoint] = True
            self._soon(delay, LinkUp(endpoint))
            return
        if other is None or not self.network.is_cut(self.name, other.name):
            self._soon(delay, LinkDown(endpoint, "connection refused"))
        self.world.after(0.2, lambda: self._try(endpoint))  # a cut answers nothing at all

    def lost(self, endpoint: str, reason: str) -> None:
        """Our link to an endpoint broke; the transport reconnects by itself."""
        if self.alive and self.dialled.get(endpoint):
            self.dialled[endpoint] = False
            self._soon(0.001, LinkDown(endpoint, reason))
            self.world.after(0.2, lambda: self._try(endpoint))

    def _hangup(self, effect: Hangup) -> None:
        self.dialled.pop(effect.endpoint, None)

    def _attach(self, effect: Attach) -> None:
        self.attached[effect.peer] = effect.endpoint

    def _post(self, endpoint: str, message: Message, *, back: bool = False) -> None:
        other = self.cluster.at(endpoint)
        if other is None:
            return
        starts, mine = other.starts, self.starts

        def arrive(_: bool) -> None:
            if other.starts != starts or not other.alive:
                return
            if back:
                other.event(LinkReceived(self.endpoint, message))
            else:
                route = f"{self.endpoint}#{mine}".encode()
                other.event(Received(self.id, self.me.instance, route, message))

        self.network.send(self.name, other.name, len(encode(message)), arrive, lossy=False)

    def _send_link(self, effect: SendLink) -> None:
        self._post(effect.endpoint, effect.message)

    def _reply(self, effect: Reply) -> None:
        self._post(effect.route.decode().partition("#")[0], effect.message, back=True)

    def _send(self, effect: Send) -> None:
        if effect.peer in self.attached:
            self._post(self.attached[effect.peer], effect.message)

    def _publish(self, effect: Publish) -> None:
        for endpoint in self.attached.values():
            self._post(endpoint, effect.message)

    # -------------------------------------------------------------------- chunks
    def _send_chunk(self, effect: SendChunk) -> None:
        header = effect.header
        mail = header.role == Role.MAIL
        whole = self.mail.buffers.payload(header, self.settings.chunk_bytes) if mail else None
        payload = bytes(self.plane.payload(header) if whole is None else whole)
        other = self.cluster.at(self.attached[effect.peer])
        if other is None:
            return
        starts = other.starts

        def arrive(damaged: bool) -> None:
            if other.starts != starts or not other.alive:
                return
            got = bytearray(payload)
            if damaged and got:
                got[len(got) // 2] ^= 1
            if digest_chunk(got) != header.digest:
                other.event(ChunkRejected(self.id, header))
                return
            data = np.frombuffer(bytes(got), np.uint8)
            if mail:
                if other.core.accepts(self.id, header):
                    other.mail.buffers.place(header, data)
            elif other.core.accepts(self.id, header) and not other.of_another_op(header):
                other.plane.put_chunk(header.gid, header.seq, header.role, header.part, header.index, data)
            other.event(ChunkReceived(self.id, header))

        size = header.size + CHUNK_HEAD_BYTES
        self.network.send(self.name, other.name, size, arrive, lossy=True)

    def of_another_op(self, header: ChunkHeader) -> bool:
        """Whether a chunk belongs to another op than the one called here: only to be heard of."""
        group = self.core.groups.get(header.gid)
        op = group.ops.get(header.seq) if group is not None else None
        return op is not None and op.plan is not None and op.tag != header.descriptor

    # ---------------------------------------------------------------------- work
    def _open(self, effect: OpenOp) -> None:
        self.plane.open(effect.gid, effect.seq, effect.plan, effect.host)

    def _make_part(self, effect: MakePart) -> None:
        digest = self.plane.make_part(effect.gid, effect.seq, effect.part, effect.span, effect.leaves)
        self._soon(WORK_S, PartMade(effect.gid, effect.seq, effect.part, effect.span, digest))

    def _fold(self, effect: Fold) -> None:
        digest = self.plane.fold(effect.gid, effect.seq, effect.piece, effect.leaves)
        self._soon(WORK_S, Folded(effect.gid, effect.seq, effect.piece, digest))

    def _witness(self, effect: Witness) -> None:
        roots = self.plane.witness(effect.gid, effect.seq, effect.intervals)
        assert roots is not None
        self._soon(WORK_S, Witnessed(effect.gid, effect.seq, roots))

    def _verified(self, effect: Verified) -> None:
        self.cluster.verified.setdefault(effect.rank, []).append(effect.seq)

    def _fold_solo(self, effect: FoldSolo) -> None:
        results = self.plane.fold_solo(effect.gid, effect.seq, effect.plan)
        barrier = effect.plan.descriptor.kind == OpKind.BARRIER
        for rank, data in zip(effect.plan.hosts[0].ranks, results, strict=True):
            self.cluster.results[rank][effect.seq] = None if barrier else data

    def _close(self, effect: CloseOp) -> None:
        self.plane.close(effect.gid, effect.seq)

    def _deliver(self, effect: Deliver) -> None:
        self.cluster.delivered(self, effect)

    def _rank(self, effect: Joined | Fail | Note) -> None:
        self.cluster.told(self, effect)

    def _ignore(self, _: Effect) -> None:
        """For people and metrics only."""
