"""``PeerCore``: everything a peer decides. The only machine that drivers know.

It joins the peer table, the transfer windows, the forming of groups and their ops, routes events to them,
and hands out their effects. See ``frogzmq.machine`` for the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from frogzmq.machine import (
    ChunkReceived,
    ChunkRejected,
    CloseOp,
    Effect,
    Event,
    Fail,
    LinkDown,
    LinkReceived,
    LinkUp,
    PeerDown,
    PeerUp,
    Received,
    SendChunk,
    Stats,
    Tick,
)
from frogzmq.proto.group import Group
from frogzmq.proto.groups import Groups
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.report import explain, group_snapshot
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.transfer import Transfer
from frogzmq.types import GroupId, PeerId, Role
from frogzmq.wire.messages import (
    ChunkHeader,
    Control,
    Credit,
    Identity,
)


class PeerCore:
    """The core of one peer. ``me``: how this peer is known and reached."""

    def __init__(self, me: Identity, settings: CoreSettings, rng: random.Random) -> None:
        self.me = me
        self.id = PeerId(me.peer)
        self.settings = settings
        self.stats = Stats()
        self.peers = PeerTable(me, settings, rng)
        self.transfer = Transfer(settings.credit_bytes)
        self._registry = Groups(self.id, settings, self.stats, self.peers, self.transfer, self._learn)
        self.groups, self.joining = self._registry.groups, self._registry.joining
        self._events: dict[type, Callable[[Any, float, list[Effect]], None]] = {
            **self._registry.events,
            ChunkReceived: self._chunk,
            ChunkRejected: self._chunk_rejected,
        }
        self._messages: dict[type[Control], Callable[[PeerId, Any, float, list[Effect]], None]] = {
            **self._registry.messages,
            Credit: self._on_credit,
        }

    # ---------------------------------------------------------------- the machine
    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and say what to do."""
        out: list[Effect] = []
        handler = self._events.get(type(event))
        if handler is not None:
            handler(event, now, out)
        elif isinstance(event, Tick):
            self._tick(now, out)
        elif isinstance(event, Received) and type(event.message) in self._messages:
            self.peers.heard(event.peer, now)
            self._messages[type(event.message)](event.peer, event.message, now, out)
        elif isinstance(event, (Received, LinkUp, LinkDown, LinkReceived)):
            self._peers(self.peers.handle(event, now), now, out)
        return self._gate(out)

    def seed(self, endpoint: str, now: float) -> list[Effect]:
        """Dial a configured address from now on."""
        out: list[Effect] = []
        self._peers(self.peers.seed(endpoint, now), now, out)
        return self._gate(out)

    def mismatch(self, where: str, theirs: int, now: float) -> list[Effect]:
        """Another protocol version was met at ``where`` (an endpoint that we dialled, or a peer id)."""
        out: list[Effect] = []
        self._peers(self.peers.mismatch(where, theirs, now), now, out)
        return self._gate(out)

    @property
    def deadline(self) -> float:
        """When to send the next ``Tick``; infinity while idle."""
        return min(self._registry.deadline, self.peers.deadline)

    def _gate(self, out: list[Effect]) -> list[Effect]:
        """Pass chunks through the windows; stamp watermarks; count."""
        if not any(type(effect) in (SendChunk, CloseOp, Fail) for effect in out):
            return out
        gated: list[Effect] = []
        for effect in out:
            kind = type(effect)
            if kind is SendChunk:
                assert isinstance(effect, SendChunk)
                if effect.header.done:
                    gated.append(effect)  # has been through the window
                else:
                    self.transfer.send(effect, gated)
            else:
                if kind is CloseOp:
                    assert isinstance(effect, CloseOp)
                    self.transfer.drop_op(effect.gid, effect.seq)
                elif kind is Fail:
                    self.stats.ops_failed += 1
                gated.append(effect)
        return self._stamp(gated)

    def _stamp(self, out: list[Effect]) -> list[Effect]:
        for index, effect in enumerate(out):
            if type(effect) is SendChunk and effect.header.done == 0:
                group = self.groups.get(effect.header.gid)
                done = group.done if group is not None else 1
                if group is not None:
                    host = group.host_of[effect.peer]
                    group.told[host] = max(group.told[host], done)
                self.stats.chunks_sent += 1
                self.stats.chunk_bytes_sent += effect.header.size
                out[index] = SendChunk(effect.peer, effect.header._replace(done=done))
        return out

    def _tick(self, now: float, out: list[Effect]) -> None:
        if now >= self.peers.deadline:
            self._peers(self.peers.handle(Tick(), now), now, out)
        if now >= self._registry.deadline:
            self._registry.tick(now, out)

    @property
    def busy(self) -> bool:
        """Whether any group lives here: an ephemeral peer must not end yet."""
        return bool(self.groups)

    # ------------------------------------------------------------- work and chunks
    def accepts(self, peer: PeerId, header: ChunkHeader) -> bool:
        """Ask before keeping a chunk's bytes: False for duplicates and whatever was never due here."""
        group = self.groups.get(header.gid)
        if group is None:
            self.stats.drops += 1
            return False
        if not self._accepts(group, peer, header):
            self.stats.duplicates += 1
            return False
        return True

    def _accepts(self, group: Group, peer: PeerId, header: ChunkHeader) -> bool:
        if header.role == Role.MAIL:
            return self._registry.room.accepts(group, peer, header)
        return group.accepts(peer, header)

    def _chunk(self, event: ChunkReceived, now: float, out: list[Effect]) -> None:
        """A chunk that ``accepts`` agreed to, or one whose bytes the driver dropped because it did not."""
        self._took(event.peer, event.header, now, out)
        group = self.groups.get(event.header.gid)
        if group is not None and self._accepts(group, event.peer, event.header):
            if event.header.role == Role.MAIL:
                self._registry.room.chunk(group, event.header, now, out)
                group.other_done(group.host_of[event.peer], event.header.done, out)
            else:
                group.chunk(event.peer, event.header, now, out)
        elif group is not None and event.peer in group.host_of:
            group.other_done(group.host_of[event.peer], event.header.done, out)

    def _took(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        self.stats.chunks_received += 1
        self.stats.chunk_bytes_received += header.size
        self._registry.heard[peer] = now
        self.peers.heard(peer, now)
        self.transfer.took(peer, header, out)

    def _chunk_rejected(self, event: ChunkRejected, now: float, out: list[Effect]) -> None:
        self._took(event.peer, event.header, now, out)
        self.stats.rejected_chunks += 1
        by_peer = self.stats.rejected_by_peer
        if event.peer in by_peer or len(by_peer) < self.settings.max_peers:
            by_peer[event.peer] = by_peer.get(event.peer, 0) + 1
        group = self.groups.get(event.header.gid)
        if group is None or event.peer not in group.host_of:
            return
        if event.header.role == Role.MAIL:
            self._registry.room.rejected(group, event.peer, event.header, now, out)
        else:
            group.rejected(event.peer, event.header, now, out)

    # -------------------------------------------------------------------- messages
    def _on_credit(self, peer: PeerId, message: Credit, now: float, out: list[Effect]) -> None:
        freed: list[Effect] = []
        self.transfer.credited(peer, message.cost, freed)
        out.extend(self._stamp(freed))

    # ----------------------------------------------------------------------- peers
    def _learn(self, who: Identity, now: float, out: list[Effect]) -> None:
        self._peers(self.peers.learn(who, now), now, out)

    def _peers(self, effects: list[Effect], now: float, out: list[Effect]) -> None:
        """Take the peer table's notices to everyone else; pass the rest on."""
        for effect in effects:
            out.append(effect)
            if isinstance(effect, PeerUp):
                freed: list[Effect] = []
                self.transfer.reconnected(effect.peer, freed)
                out.extend(self._stamp(freed))
                self._registry.peer_up(effect.peer, now, out)
            elif isinstance(effect, PeerDown):
                self.transfer.forget(effect.peer)
                self._registry.peer_down(effect, now, out)

    # ---------------------------------------------------------------------- people
    def witnessed_groups(self) -> list[Group]:
        """Groups that keep receipts, those that are over first."""
        groups = [*self._registry.past, *self.groups.values()]
        return [group for group in groups if group.ledger is not None]

    def explain(self, gid: GroupId, seq: int, now: float) -> str:
        """Why an op is not done yet, for an error message."""
        group = self.groups.get(gid)
        return explain(group, seq, self.peers) if group is not None else "the group is gone"

    def snapshot(self, now: float) -> dict[str, Any]:
        """State for ``frogzmq peek``; plain values only."""
        stats = self.stats
        counters = {name: getattr(stats, name) for name in stats.__slots__}
        counters["ops_done"] = sum(group.ops_done for group in self.groups.values()) + self.stats.ops_done
        counters["repairs_asked"] = (
            sum(group.repairs_asked for group in self.groups.values()) + stats.repairs_asked
        )
        return {
            "peers": self.peers.snapshot(now),
            "groups": [
                group_snapshot(group, self.joining.get(gid), now) for gid, group in self.groups.items()
            ],
            "transfer": self.transfer.snapshot(),
            "counters": counters,
        }

    def check(self) -> None:
        """Invariants, for tests after every event."""
        for group in self.groups.values():
            assert group.done not in group.complete
            for seq, op in group.ops.items():
                assert op.seq == seq
                if op.plan is not None:
                    assert op.pieces_left >= 0
                    assert op.parts_left >= 0
                    assert op.complete == (op.pieces_left == 0 and op.parts_left == 0)
