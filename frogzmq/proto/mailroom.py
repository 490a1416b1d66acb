"""Brings what ranks and other machines say about messages to the ``Mail`` of the group that it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frogzmq.machine import Effect
from frogzmq.mailing import (
    CloseMail,
    MailKey,
    MailMade,
    MailPosted,
    MailRead,
    MailReady,
    MailTaken,
    ReceivePosted,
)
from frogzmq.proto.group import Group
from frogzmq.types import GroupId, PeerId
from frogzmq.wire.messages import (
    ChunkHeader,
    Control,
    MailAsk,
    MailLost,
    MailOffer,
    MailSeen,
    MailWant,
)

Bury = Callable[[Group, float, list[Effect]], None]


class MailRoom:
    """``groups`` are those of the peer; ``bury`` is told of groups that may be over."""

    def __init__(self, groups: dict[GroupId, Group], bury: Bury) -> None:
        self._groups, self._bury = groups, bury
        self.events: dict[type, Callable[[Any, float, list[Effect]], None]] = {
            MailPosted: self._posted, MailReady: self._ready, ReceivePosted: self._receive,
            MailTaken: self._taken, MailRead: self._read, MailMade: self._made,
        }  # fmt: skip
        self.messages: dict[type[Control], Callable[[PeerId, Any, float, list[Effect]], None]] = {
            MailOffer: self._on_offer, MailWant: self._on_want, MailSeen: self._on_seen,
            MailAsk: self._on_ask, MailLost: self._on_lost,
        }  # fmt: skip

    # ----------------------------------------------------------------- local ranks
    def _posted(self, event: MailPosted, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.key.gid)
        if group is None:
            out.append(CloseMail(event.key))
        else:
            group.mail.posted(event, now, out)

    def _ready(self, event: MailReady, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.key.gid)
        if group is not None:
            group.mail.ready(event.key, event.ready, now, out)

    def _receive(self, event: ReceivePosted, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.gid)
        if group is not None:
            group.mail.receive(event, now, out)

    def _taken(self, event: MailTaken, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.gid)
        if group is not None:
            group.mail.taken(event.rank, event.n, now, out)

    def _read(self, event: MailRead, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.gid)
        if group is not None:
            group.mail.read(event.rank, event.count, now, out)

    def _made(self, event: MailMade, now: float, out: list[Effect]) -> None:
        group = self._groups.get(event.key.gid)
        letter = group.mail.outbox.letter(event.key) if group is not None else None
        if group is not None and letter is not None:
            group.mail.outbox.made(letter, event.index, event.digest, out)

    # -------------------------------------------------------------------- messages
    def _group(self, peer: PeerId, gid: str) -> Group | None:
        """The group, where the sender is one of its machines and messages still go."""
        group = self._groups.get(GroupId(bytes.fromhex(gid)))
        return group if group is not None and peer in group.host_of and not group.mail.over else None

    def _on_offer(self, peer: PeerId, message: MailOffer, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.mail.inbox.offer(peer, message, now, out)

    def _to_receiver(self, peer: PeerId, message: MailWant | MailSeen) -> Group | None:
        """The group, where the receiver is a rank of the machine that speaks."""
        group = self._group(peer, message.gid)
        member = group.members.get(message.dst) if group is not None else None
        return group if member is not None and member.who.peer == peer else None

    def _on_want(self, peer: PeerId, message: MailWant, now: float, out: list[Effect]) -> None:
        group = self._to_receiver(peer, message)
        if group is not None and message.src in group.mail.boxes:
            group.mail.outbox.want(message, peer, out)

    def _on_seen(self, peer: PeerId, message: MailSeen, now: float, out: list[Effect]) -> None:
        group = self._to_receiver(peer, message)
        if group is not None:
            group.mail.outbox.seen(message, now, out)
            self._bury(group, now, out)

    def _on_ask(self, peer: PeerId, message: MailAsk, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        if group is not None:
            group.mail.inbox.ask(peer, message, out)

    def _on_lost(self, peer: PeerId, message: MailLost, now: float, out: list[Effect]) -> None:
        group = self._group(peer, message.gid)
        member = group.members.get(message.src) if group is not None else None
        if group is not None and member is not None and member.who.peer == peer:
            key = MailKey(group.gid, message.src, message.dst, message.n)
            group.mail.lost(key, message.text, out)

    # ---------------------------------------------------------------------- chunks
    def accepts(self, group: Group, peer: PeerId, header: ChunkHeader) -> bool:
        """Whether a chunk's bytes should be kept."""
        return peer in group.host_of and not group.mail.over and group.mail.inbox.accepts(peer, header)

    def chunk(self, group: Group, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A verified chunk that ``accepts`` said yes to."""
        letter = group.mail.inbox.chunk(header, now, out)
        if letter is not None:
            group.mail.grown(letter, now, out)

    def rejected(
        self, group: Group, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]
    ) -> None:
        """A damaged chunk."""
        if group.mail.over:
            return
        text = group.mail.inbox.rejected(peer, header, now, out)
        if text:
            group.fail(group.mail.first(), "IntegrityError", text, now, out)
