"""All groups that live on one machine: forming, running, failing, kept for others, gone.

Routes what local ranks call and what other machines say to the group it concerns. A group without local
ranks stays as long as another machine may still ask for its bytes; a machine's word about a group that no
rank of ours has joined yet is kept for a while, and so is how a group failed to form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from frogzmq.machine import (
    CloseOp,
    Effect,
    Fail,
    Folded,
    PartMade,
    PeerDown,
    RankConsumed,
    RankGot,
    RankJoined,
    RankLeft,
    RankPosted,
    RankReady,
    Send,
    Stats,
    Witnessed,
)
from frogzmq.proto.group import Group
from frogzmq.proto.holding import PAST_ALL
from frogzmq.proto.joining import Joining
from frogzmq.proto.mailroom import MailRoom
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.transfer import Transfer
from frogzmq.types import GroupId, PeerId
from frogzmq.wire.messages import (
    Control,
    GroupFailed,
    GroupReady,
    Have,
    Identity,
    JoinGroup,
    Links,
    Manifest,
    OpDescriptor,
    OpDone,
    OpReceipt,
    RankGone,
    Want,
)

MAX_EARLY_GROUPS = 1024
EARLY_GROUP_S = 300.0
"""How long a machine's word that its ranks have joined is kept for ranks of ours that have not yet."""
MAX_FAILED_GROUPS = 256
MAX_PAST_LEDGERS = 8
FINISHED_GROUP_S = 30.0
"""How long a group without local ranks stays for other machines that may still ask for its bytes."""

Learn = Callable[[Identity, float, list[Effect]], None]


class Groups:
    """The groups of peer ``me``. ``learn`` makes a machine of a group known to the peer table."""

    def __init__(
        self,
        me: PeerId,
        settings: CoreSettings,
        stats: Stats,
        peers: PeerTable,
        transfer: Transfer,
        learn: Learn,
    ) -> None:
        self.id, self.settings, self.stats = me, settings, stats
        self.peers, self.transfer, self.learn = peers, transfer, learn
        self.groups: dict[GroupId, Group] = {}
        self.joining: dict[GroupId, Joining] = {}
        self.heard: dict[PeerId, float] = {}
        """When each peer's last chunk came."""
        self._early: dict[str, tuple[float, dict[PeerId, GroupReady]]] = {}
        self._finished: dict[GroupId, float] = {}
        self._failed: dict[str, GroupFailed] = {}
        """How groups failed that never formed: machines whose ranks come later are told."""
        self.past: deque[Group] = deque(maxlen=MAX_PAST_LEDGERS)
        """Groups that are over and whose receipts can still be asked for."""
        self._timers = float("inf")
        self.events: dict[type, Callable[[Any, float, list[Effect]], None]] = {
            RankPosted: self._rank_posted,
            RankReady: self._rank_ready,
            RankConsumed: self._rank_consumed,
            RankGot: self._rank_got,
            Witnessed: self._witnessed,
            PartMade: self._part_made,
            Folded: self._folded,
            RankJoined: self._rank_joined,
            RankLeft: self._rank_left,
        }
        self.messages: dict[type[Control], Callable[[PeerId, Any, float, list[Effect]], None]] = {
            OpDone: self._on_op_done,
            OpReceipt: self._on_op_receipt,
            GroupReady: self._on_group_ready,
            GroupFailed: self._on_group_failed,
            RankGone: self._on_rank_gone,
            OpDescriptor: self._on_op_descriptor,
            Manifest: self._on_manifest,
            Want: self._on_want,
            Have: self._on_have,
            Links: self._on_links,
        }
        self.room = MailRoom(self.groups, self._bury)
        self.events |= self.room.events
        self.messages |= self.room.messages

    @property
    def deadline(self) -> float:
        """When ``tick`` wants to run."""
        deadline = self._timers
        for group in self.groups.values():
            deadline = min(deadline, group.deadline)
        for joining in self.joining.values():
            deadline = min(deadline, joining.deadline)
        return deadline

    def tick(self, now: float, out: list[Effect]) -> None:
        """Do what is due."""
        for joining in list(self.joining.values()):
            if now >= joining.deadline:
                joining.tick(now, out)
            if joining.over:
                del self.joining[joining.group.gid]
        for group in list(self.groups.values()):
            if now >= group.deadline:
                group.tick(now, self.heard, out)
            self._bury(group, now, out)
        if now >= self._timers:
            self._expire(now, out)

    # ----------------------------------------------------------------- local ranks
    def _rank_joined(self, event: RankJoined, now: float, out: list[Effect]) -> None:
        join = event.join
        gid = GroupId(bytes.fromhex(join.gid))
        refusal = self._join_refusal(join)
        if refusal:
            out.append(Fail(gid, join.rank, 0, "ConfigError", refusal))
            return
        joining = self.joining.get(gid)
        if gid in self.groups and joining is None:
            text = f"group {join.name!r} exists already on this machine and is complete"
            out.append(Fail(gid, join.rank, 0, "DuplicateIdentity", text))
            return
        if joining is None:
            group = self.groups[gid] = Group(join, self.id, self.settings, self.transfer)
            joining = self.joining[gid] = Joining(group, join, self.peers, now)
            for host in group.hosts:
                if host.peer != self.id:
                    who = group.members[host.ranks[0]].who
                    self.learn(who, now, out)
            for peer, message in self._early.pop(join.gid, (0.0, {}))[1].items():
                if peer in group.host_of:
                    joining.ready(group.host_of[peer], message, now, out)
        joining.add(join.rank, join, now, out)
        if now >= joining.deadline:
            joining.tick(now, out)

    def _join_refusal(self, join: JoinGroup) -> str:
        ranks = sorted(member.rank for member in join.members)
        if ranks != list(range(join.size)):
            return f"group {join.name!r} of size {join.size} has members {ranks}"
        mine = next(member for member in join.members if member.rank == join.rank)
        if mine.who.peer != self.id:
            return f"rank {join.rank} is listed under peer {mine.who.peer}, this one is {self.id}"
        return ""

    def _rank_posted(self, event: RankPosted, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        if group is None:
            out.append(CloseOp(event.gid, event.seq))  # the group failed and is gone: drop the bytes
        else:
            group.posted(event.rank, event.seq, event.descriptor, event.ready, now, out)

    def _rank_ready(self, event: RankReady, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        op = group.ops.get(event.seq) if group is not None else None
        if group is not None and op is not None and event.rank in op.posted:
            op.more(event.rank, event.ready, now, out)
            group.settle(op, now, out)

    def _rank_consumed(self, event: RankConsumed, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        op = group.ops.get(event.seq) if group is not None else None
        if group is not None and op is not None:
            op.unconsumed.discard(event.rank)
            group.settle(op, now, out)

    def _rank_got(self, event: RankGot, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        if group is not None and group.ledger is not None:
            group.ledger.got(event.rank, event.seq, event.root, now, out)
            self._rank_consumed(RankConsumed(event.gid, event.rank, event.seq), now, out)

    def _witnessed(self, event: Witnessed, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        if group is not None and group.ledger is not None:
            group.ledger.witnessed(event.seq, event.roots, now, out)
            self._bury(group, now, out)

    def _rank_left(self, event: RankLeft, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        if group is None:
            return
        joining = self.joining.get(event.gid)
        if joining is not None and not joining.settled:
            text = f"{group.rank_text(event.rank)} left while group {group.name!r} formed: {event.reason}"
            group.local[event.rank] = False
            group.fail(0, "RankLost", text, now, out)
        else:
            group.rank_left(event.rank, event.clean, event.reason, now, out)
        self._bury(group, now, out)

    def _part_made(self, event: PartMade, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        op = group.ops.get(event.seq) if group is not None else None
        if group is not None and op is not None:
            op.part_made(event.part, event.span, event.digest, now, out)
            group.settle(op, now, out)

    def _folded(self, event: Folded, now: float, out: list[Effect]) -> None:
        group = self.groups.get(event.gid)
        op = group.ops.get(event.seq) if group is not None else None
        if group is not None and op is not None:
            op.folded(event.piece, event.digest, out)
            group.settle(op, now, out)

    # -------------------------------------------------------------------- messages
    def _group(self, peer: PeerId, gid: str) -> Group | None:
        """The group, where the sender is one of its machines."""
        group = self.groups.get(GroupId(bytes.fromhex(gid)))
        return group if group is not None and peer in group.host_of else None

    def _on_op_done(self, peer: PeerId, message: OpDone, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.other_done(group.host_of[peer], message.upto, out)
        if message.ask:
            upto = group.done if group is not None else PAST_ALL
            out.append(Send(peer, OpDone(gid=message.gid, upto=upto)))
        if group is not None:
            self._bury(group, now, out)

    def _on_op_receipt(self, peer: PeerId, message: OpReceipt, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None and group.ledger is not None:
            group.ledger.heard(group.host_of[peer], message, now, out)
            self._bury(group, now, out)
        elif message.ask:
            for past in self.past:
                if past.hex == message.gid and past.ledger is not None and peer in past.host_of:
                    past.ledger.answer(past.host_of[peer], message.seq, out)

    def _on_group_ready(self, peer: PeerId, message: GroupReady, now: float, out: list[Effect]) -> None:
        gid = GroupId(bytes.fromhex(message.gid))
        group, joining = self.groups.get(gid), self.joining.get(gid)
        if message.gid in self._failed:
            out.append(Send(peer, self._failed[message.gid]))
        elif group is None:
            if message.gid in self._early or len(self._early) < MAX_EARLY_GROUPS:
                early = self._early.setdefault(message.gid, (now, {}))[1]
                if len(early) < self.settings.max_peers:
                    early[peer] = message
                self._timers = min(self._timers, now + EARLY_GROUP_S + 1.0)
        elif peer in group.host_of:
            if joining is not None and group.broken and not joining.settled:
                out.append(Send(peer, group.failure()))  # it may not have known the group when that was told
            elif joining is not None:
                joining.ready(group.host_of[peer], message, now, out)
                if now >= joining.deadline:
                    joining.tick(now, out)
            elif not message.settled:
                # It lost our last word: everyone else has heard it, so repeat it here.
                self._repeat(group, message, peer, out)

    def _repeat(self, group: Group, message: GroupReady, peer: PeerId, out: list[Effect]) -> None:
        ranks = list(group.hosts[group.here].ranks)
        out.append(Send(peer, message.model_copy(update={"ranks": ranks, "settled": True})))

    def _on_group_failed(self, peer: PeerId, message: GroupFailed, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.fail(message.seq, message.code, message.text, now, out, tell=False)

    def _on_rank_gone(self, peer: PeerId, message: RankGone, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None and message.rank in group.hosts[group.host_of[peer]].ranks:
            group.rank_gone(
                message.rank, message.last_seq, message.clean, message.reason, now, out, message.mail
            )

    def _on_op_descriptor(self, peer: PeerId, message: OpDescriptor, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None and message.rank in group.hosts[group.host_of[peer]].ranks:
            group.described(message, now, out)

    def _on_manifest(self, peer: PeerId, message: Manifest, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.manifest(peer, message, now, out)

    def _on_want(self, peer: PeerId, message: Want, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        op = group.ops.get(message.seq) if group is not None else None
        if group is None or op is None:
            return
        group.asked(op, peer, message.items, out)
        for role, part, index in message.items:
            key = (role, part, index)
            if role in (0, 1) and not self.transfer.queued(peer, op.gid, op.seq, key):
                self.stats.repairs_answered += op.resend(key, peer, out)

    def _on_have(self, peer: PeerId, message: Have, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.have(group.host_of[peer], message, now)

    def _on_links(self, peer: PeerId, message: Links, now: float, out: list[Effect]) -> None:
        """What others measured is not used yet."""

    # ----------------------------------------------------------------- coming and going
    def peer_up(self, peer: PeerId, now: float, out: list[Effect]) -> None:
        """A machine can be sent to: what was waiting for it is said now."""
        for joining in self.joining.values():
            if peer in joining.group.host_of and joining.all_here:
                joining.send_at = now
                joining.tick(now, out)

    def peer_down(self, down: PeerDown, now: float, out: list[Effect]) -> None:
        """A machine is gone, with everything that its groups still wait for."""
        self.heard.pop(down.peer, None)
        for group in list(self.groups.values()):
            host = group.host_of.get(down.peer)
            if host is None:
                continue
            joining = self.joining.get(group.gid)
            if joining is not None and not joining.settled:
                text = f"cannot reach {group.machine(host)} for group {group.name!r}: {down.reason}"
                group.fail(0, "PeerUnreachable", text, now, out)
            else:
                group.peer_gone(host, down.reason, now, out)
            self._bury(group, now, out)

    def _bury(self, group: Group, now: float, out: list[Effect]) -> None:
        """Drop a group that no local rank uses, at once or when others no longer need its bytes."""
        if group.gid not in self.groups or not group.local or any(group.local.values()):
            return
        if group.finished:
            self._drop(group.gid, out)
        elif group.gid not in self._finished:
            self._finished[group.gid] = now + FINISHED_GROUP_S
            self._timers = min(self._timers, now + FINISHED_GROUP_S)

    def _drop(self, gid: GroupId, out: list[Effect]) -> None:
        self._finished.pop(gid, None)
        joining = self.joining.pop(gid, None)
        group = self.groups.pop(gid, None)
        if group is not None:
            if group.ledger is not None:
                self.past.append(group)
            if group.broken and joining is not None and not joining.settled:
                if len(self._failed) >= MAX_FAILED_GROUPS:
                    del self._failed[next(iter(self._failed))]
                self._failed[group.hex] = group.failure()
            self.stats.ops_done += group.ops_done
            self.stats.repairs_asked += group.repairs_asked
            group.close(out)

    def _expire(self, now: float, out: list[Effect]) -> None:
        """Drop groups that were kept for others long enough, and early words nobody came for."""
        for gid in [gid for gid, at in self._finished.items() if now >= at]:
            group = self.groups.get(gid)
            if group is not None and group.mail.owes:  # until its receiver has it, or is gone
                self._finished[gid] = now + FINISHED_GROUP_S
            else:
                self._drop(gid, out)
        for gid_hex in [g for g, (at, _) in self._early.items() if now - at > EARLY_GROUP_S]:
            del self._early[gid_hex]
        ends = list(self._finished.values()) + [at + EARLY_GROUP_S + 1.0 for at, _ in self._early.values()]
        self._timers = min(ends, default=float("inf"))
