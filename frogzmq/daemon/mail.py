"""Messages between ranks, at the border: datagrams of local ranks to events, the core's effects to datagrams.

What a rank hands over stays where it wrote it, pinned, until the core says that nobody needs it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frogzmq.content.chunks import matches
from frogzmq.daemon.rankconn import Connection, Seat
from frogzmq.daemon.ranks import RankService
from frogzmq.daemon.workers import Workers
from frogzmq.dataplane.mailbuffers import MailBuffers
from frogzmq.dtypes import dtype_of
from frogzmq.errors import StoreFull, WireError
from frogzmq.machine import ChunkReceived, ChunkRejected, Effect, Event
from frogzmq.mailing import (
    ANY_RANK,
    AskBytes,
    CloseMail,
    DeliverMail,
    FailMail,
    FailReceive,
    MailKey,
    MailMade,
    MailPosted,
    MailRead,
    MailReady,
    MailTaken,
    MakeMail,
    OpenMail,
    ReceivePosted,
)
from frogzmq.proto.peer import PeerCore
from frogzmq.store.index import Extent
from frogzmq.types import Digest, GroupId, PeerId
from frogzmq.wire import limits, ranks
from frogzmq.wire.limits import EXPLAIN_CHARS, clip
from frogzmq.wire.messages import ChunkHeader

log = logging.getLogger("frogzmq.mail")

INLINE_WORK_BYTES = 128 << 10
"""Hashing up to this many bytes takes less time than waking a thread."""
SAY_OVER = limits.MAIL_UNREAD // 4
"""After so many small messages that are over, their sender is told."""


@dataclass(slots=True)
class _Sent:
    """A message that a local rank has sent and that is not over."""

    seat: Seat
    size: int
    inline: bool = False
    asked: bool = False
    ready: int = -1
    extent: Extent | None = None


@dataclass(slots=True)
class _Book:
    """What one local rank has sent and received in one group."""

    seat: Seat
    sent: dict[int, int] = field(default_factory=dict)
    received: int = 0
    open: int = 0
    unasked: int = 0
    """Small messages that were given unasked and are not over."""
    over: int = 0
    told: int = 0


class MailDesk:
    """``feed`` takes events, ``carry_out`` effects; ``clock`` gives the seconds that the core sees."""

    def __init__(
        self,
        core: PeerCore,
        service: RankService,
        workers: Workers,
        feed: Callable[[Event], None],
        carry_out: Callable[[list[Effect]], None],
        clock: Callable[[], float],
    ) -> None:
        self.core, self.service, self.workers = core, service, workers
        self.feed, self.carry_out, self.clock = feed, carry_out, clock
        self.buffers = MailBuffers(service.arena)
        self._sent: dict[MailKey, _Sent] = {}
        self._books: dict[tuple[GroupId, int], _Book] = {}
        self.requests: dict[type, Callable[[Connection, Any], None]] = {
            ranks.Mail: self._mail, ranks.MailBytes: self._bytes, ranks.Receive: self._receive,
            ranks.MailTaken: self._taken, ranks.MailRead: self._read,
        }  # fmt: skip
        self.effects: dict[type, Callable[[Any], None]] = {
            AskBytes: self._ask, MakeMail: self._make, OpenMail: self._open, DeliverMail: self._deliver,
            CloseMail: self._close, FailReceive: self._fail_receive, FailMail: self._fail_mail,
        }  # fmt: skip

    # -------------------------------------------------------------------- requests
    def _book(self, conn: Connection, handle: int) -> _Book | None:
        """The rank's book; None where it has just left. ``WireError`` before the group is complete."""
        seat = self.service.seat(conn, handle)
        if seat is None:
            return None
        book = self._books.get((seat.gid, seat.rank))
        if book is None or book.seat is not seat:
            if not seat.joined:
                raise WireError("a message was sent or received before the group was complete")
            book = self._books[seat.gid, seat.rank] = _Book(seat)
        return book

    def _member(self, seat: Seat, rank: int) -> None:
        group = self.core.groups.get(seat.gid)
        if group is not None and rank not in group.members:
            raise WireError(f"rank {rank} is not in the group of {group.size} ranks")

    def _mail(self, conn: Connection, mail: ranks.Mail) -> None:
        book = self._book(conn, mail.handle)
        if book is None:
            return
        seat, inline = book.seat, bool(mail.flags & ranks.INLINE)
        self._member(seat, mail.dst)
        dtype_of(mail.dtype)
        last = book.sent.get(mail.dst, 0)
        if mail.n != last + 1:
            raise WireError(f"message {mail.n} to rank {mail.dst} after message {last}: they are numbered")
        if book.open >= limits.MAIL_WINDOW or book.unasked >= 2 * limits.MAIL_UNREAD:
            raise WireError(f"{book.open} messages, {book.unasked} small ones unasked, are not over; no more")
        book.sent[mail.dst] = mail.n
        book.open += 1
        key = MailKey(seat.gid, seat.rank, mail.dst, mail.n)
        sent = self._sent[key] = _Sent(seat, mail.size, inline)
        if inline:
            book.unasked += 1
            sent.ready = mail.size
            self.buffers.put(key, mail.payload)
        self.feed(MailPosted(key, mail.tag, mail.dtype, mail.size, inline))

    def _bytes(self, conn: Connection, given: ranks.MailBytes) -> None:
        book = self._book(conn, given.handle)
        if book is None:
            return
        key = MailKey(book.seat.gid, book.seat.rank, given.dst, given.n)
        sent = self._sent.get(key)
        if sent is None:
            if given.n > book.sent.get(given.dst, 0):
                raise WireError(f"bytes of message {given.n} to rank {given.dst}, which was not sent")
            if given.flags & ranks.INLINE:  # over meanwhile: it counts as one that was given
                self._inline_over(book)
            return
        if not sent.ready < given.ready <= sent.size:
            raise WireError(f"{given.ready} of {sent.size} bytes of a message ready after {sent.ready}")
        if given.flags & ranks.INLINE:
            if given.ready != sent.size or sent.ready >= 0:
                raise WireError(f"{given.ready} bytes inline for a message of {sent.size}")
            sent.inline = True
            book.unasked += not sent.asked
            self.buffers.put(key, given.payload)
        elif sent.extent is None:
            view = self.service.arena.view(given.seg, given.off, sent.size, conn.owner)
            sent.extent = self.service.arena.pin(given.seg, given.off)
            self.buffers.put(key, view)
        sent.ready = given.ready
        self.feed(MailReady(key, given.ready))

    def _receive(self, conn: Connection, receive: ranks.Receive) -> None:
        book = self._book(conn, receive.handle)
        if book is None:
            return
        seat = book.seat
        src = ANY_RANK if receive.src == ranks.ANY else receive.src
        if src != ANY_RANK:
            self._member(seat, src)
        if receive.n != book.received + 1:
            raise WireError(
                f"receive {receive.n} after receive {book.received}: they are numbered one by one"
            )
        group = self.core.groups.get(seat.gid)
        if group is not None and group.mail.boxes[seat.rank].waiting >= limits.MAIL_WINDOW:
            raise WireError(f"more than {limits.MAIL_WINDOW} receives wait in one group")
        book.received = receive.n
        self.feed(
            ReceivePosted(
                seat.gid, seat.rank, receive.n, src, receive.tag, dtype_of(receive.dtype).name, receive.size
            )
        )

    def _taken(self, conn: Connection, taken: ranks.MailTaken) -> None:
        seat = self.service.seat(conn, taken.handle)
        if seat is not None:
            self.feed(MailTaken(seat.gid, seat.rank, taken.n))

    def _read(self, conn: Connection, read: ranks.MailRead) -> None:
        seat = self.service.seat(conn, read.handle)
        if seat is not None:
            self.feed(MailRead(seat.gid, seat.rank, read.n))

    # ---------------------------------------------------------------------- chunks
    def arrived(self, peer: PeerId, header: ChunkHeader, payload: memoryview) -> None:
        """A chunk came that the core accepts: check it and put it in its place, here or in a thread."""
        if header.size <= INLINE_WORK_BYTES:
            good = matches(payload, header.digest)
            if good:
                self.buffers.place(header, payload)
            self.feed(ChunkReceived(peer, header) if good else ChunkRejected(peer, header))
            return
        target = self.buffers.target(header)

        def task() -> bool:
            good = matches(payload, header.digest)
            if good and target is not None:  # while it is in the cache
                np.copyto(target, np.frombuffer(payload, np.uint8))
            return good

        self.workers.submit(header.seq, (self._checked, (peer, header, payload, target is not None)), task)

    def _checked(self, chunk: tuple[PeerId, ChunkHeader, memoryview, bool], good: bool) -> None:
        peer, header, payload, placed = chunk
        if placed:
            self.buffers.settled(header)
        if not good:
            log.warning("a chunk of a message from %s does not match its digest: dropped", peer)
            self.feed(ChunkRejected(peer, header))
            return
        if not placed and self.core.accepts(peer, header):
            self.buffers.place(header, payload)
        self.feed(ChunkReceived(peer, header))

    # --------------------------------------------------------------------- effects
    def _ask(self, effect: AskBytes) -> None:
        sent = self._sent.get(effect.key)
        if sent is not None:
            seat, key, sent.asked = sent.seat, effect.key, True
            self.service.send(seat, ranks.encode_mail_asked(seat.handle, key.n, key.dst))

    def _make(self, effect: MakeMail) -> None:
        buffers = self.buffers
        if effect.stop - effect.start <= INLINE_WORK_BYTES:
            self._made(effect, buffers.digest(effect.key, effect.start, effect.stop))
        else:
            self.workers.submit(
                effect.key.n,
                (self._made, effect),
                lambda: buffers.digest(effect.key, effect.start, effect.stop),
            )

    def _made(self, effect: MakeMail, digest: Digest | None) -> None:
        if digest is not None:
            self.feed(MailMade(effect.key, effect.index, digest))

    def _open(self, effect: OpenMail) -> None:
        try:
            self.buffers.open(effect.key, effect.size, effect.chunk_bytes)
        except StoreFull as error:
            self._no_room(effect.key, error)

    def _no_room(self, key: MailKey, error: StoreFull) -> None:
        group = self.core.groups.get(key.gid)
        if group is not None:
            effects: list[Effect] = []
            text = f"machine {self.core.me.name}, message from rank {key.src}: {error}"
            group.fail(group.mail.first(), "StoreFull", text, self.clock(), effects)
            self.carry_out(effects)

    def _deliver(self, effect: DeliverMail) -> None:
        key = effect.key
        seat = self.service.seats.get((key.gid, key.dst))
        if seat is None:
            return
        if effect.inline:
            data, flags = self.buffers.whole(key).tobytes(), ranks.INLINE | ranks.FINAL
            datagram = ranks.encode_arrived(
                seat.handle, effect.n, flags, key.src, 0, 0, effect.size, effect.size, data
            )
        else:
            try:
                place = self.buffers.where(key)
            except StoreFull as error:
                self._no_room(key, error)
                return
            flags = ranks.FINAL if effect.upto == effect.size else 0
            datagram = ranks.encode_arrived(
                seat.handle, effect.n, flags, key.src, place.seg, place.off, effect.upto, effect.size
            )
        self.service.send(seat, datagram)

    def _close(self, effect: CloseMail) -> None:
        key = effect.key
        self.buffers.close(key)
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        if sent.extent is not None:
            self.service.arena.unpin(sent.extent)
        book = self._books.get((key.gid, key.src))
        if book is not None and book.seat is sent.seat:
            book.open -= 1
            if sent.inline:
                book.unasked -= not sent.asked
                self._inline_over(book)
        if not sent.inline:
            # It may be closing its end just now: then it does not matter that it does not hear.
            sent.seat.conn.send(ranks.encode_mail_done(sent.seat.handle, key.n, key.dst))

    def _inline_over(self, book: _Book) -> None:
        book.over += 1
        if book.over - book.told >= SAY_OVER:
            book.told = book.over
            book.seat.conn.send(ranks.encode_mail_done(book.seat.handle, book.over, ranks.ANY))

    def _fail_receive(self, effect: FailReceive) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        if seat is not None:
            self._failed(seat, effect.n, -1, effect.code, effect.text)

    def _fail_mail(self, effect: FailMail) -> None:
        key = effect.key
        seat = self.service.seats.get((key.gid, key.src))
        if seat is not None:
            self._failed(seat, key.n, key.dst, effect.code, effect.text)

    def _failed(self, seat: Seat, n: int, dst: int, code: str, text: str) -> None:
        message = ranks.MailFailed(
            handle=seat.handle, n=n, dst=dst, code=code, text=clip(text, EXPLAIN_CHARS)
        )
        self.service.send_json(seat, message)

    def forget(self, gid: GroupId) -> None:
        """The group is over here."""
        for place in [place for place in self._books if place[0] == gid]:
            del self._books[place]
