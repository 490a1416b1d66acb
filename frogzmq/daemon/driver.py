"""Carries the core's effects out: into sockets, the data plane, worker threads and local ranks.

One thread. Effects may cause events at once (a small fold is done on the spot); those wait their turn in
a queue, so the core is never entered twice.

What goes wrong with the bytes of one op (no room, a chunk of another machine that does not fit) fails the
op's group; any other exception is a bug of ours and leaves the loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from frogzmq.content.chunks import matches
from frogzmq.daemon.fabric import Fabric
from frogzmq.daemon.mail import MailDesk
from frogzmq.daemon.ranks import RankService
from frogzmq.daemon.workers import Workers
from frogzmq.dataplane.plane import DataPlane
from frogzmq.errors import FrogError, StoreFull, WireError
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
    MakePart,
    Note,
    OpenOp,
    PartMade,
    PeerDown,
    PeerUp,
    Publish,
    RankJoined,
    Received,
    Reply,
    Send,
    SendChunk,
    SendLink,
    Verified,
    Witness,
    Witnessed,
)  # fmt: skip
from frogzmq.proto.peer import PeerCore
from frogzmq.types import Digest, GroupId, OpKind, PeerId, Role
from frogzmq.wire import ranks as wire
from frogzmq.wire.limits import EXPLAIN_CHARS, clip
from frogzmq.wire.messages import PROTOCOL, Bye, ChunkHeader

log = logging.getLogger("frogzmq.peer")

INLINE_WORK_BYTES = 128 << 10
"""Folding or hashing up to this many operand bytes takes less time than waking a thread."""

RECEIPT_LATER = 1 << 62
"""Receipts that nobody waits for are hashed when the workers have nothing else to do."""

Key: TypeAlias = tuple[GroupId, int]


class Driver:
    """``clock`` gives the seconds that the core sees."""

    def __init__(
        self,
        core: PeerCore,
        plane: DataPlane,
        fabric: Fabric,
        service: RankService,
        workers: Workers,
        clock: Callable[[], float],
    ) -> None:
        self.core, self.plane, self.fabric = core, plane, fabric
        self.service, self.workers, self.clock = service, workers, clock
        self.ops: dict[Key, OpenOp] = {}
        self._pending: deque[Event] = deque()
        self._handling = False
        self._trace = log.isEnabledFor(logging.DEBUG)
        self._do: dict[type, Callable[[Any], None]] = {
            Deliver: self._deliver, Fold: self._fold,
            FoldSolo: self._fold_solo, MakePart: self._make_part, OpenOp: self._open,
            CloseOp: self._close, SendChunk: self._send_chunk, Send: self._send, SendLink: self._send_link,
            Reply: self._reply, Publish: self._publish, Dial: self._dial, Hangup: self._hangup,
            Attach: self._attach, Joined: self._joined, Note: self._note, Fail: self._fail,
            CloseGroup: self._close_group, PeerUp: self._peer_up, PeerDown: self._peer_down,
            Witness: self._witness, Verified: self._verified,
        }  # fmt: skip
        self.mail = MailDesk(core, service, workers, self.feed, self._carry_out, clock)
        self._do |= self.mail.effects
        service.serve(self.mail.requests)

    # -------------------------------------------------------------------- events
    def feed(self, event: Event) -> None:
        """Give the core an event, now or after the one that is being handled."""
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                self._handle(self._pending.popleft())
        finally:
            self._handling = False
            self._pending.clear()

    def _handle(self, event: Event) -> None:
        if type(event) is RankJoined:
            for member in event.join.members:  # a local rank vouches for the machines of its job
                self.fabric.gate.allow(member.who.key)
        try:
            effects = self.core.handle(event, self.clock())
        except FrogError as error:
            if type(event) is not Received:
                raise
            self.fabric.rejected(event.peer, error)
            return
        if self._trace:
            log.debug("%r -> %r", event, effects)
        do = self._do
        for effect in effects:
            do[type(effect)](effect)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._do[type(effect)](effect)

    def on_mismatch(self, where: str, theirs: int) -> None:
        """Somebody at ``where`` speaks protocol version ``theirs``."""
        log.warning("the peer at %s speaks protocol version %d, this one %d", where, theirs, PROTOCOL)
        self._carry_out(self.core.mismatch(where, theirs, self.clock()))

    def seed(self, endpoint: str) -> None:
        """Dial a configured address from now on."""
        self._carry_out(self.core.seed(endpoint, self.clock()))

    # -------------------------------------------------------------------- chunks
    def on_chunk(self, peer: PeerId, header: ChunkHeader, payload: memoryview) -> None:
        """A chunk came in: check it, here or in a thread, before the core hears of it."""
        if not self.core.accepts(peer, header):
            self.feed(ChunkReceived(peer, header))
        elif header.role == Role.MAIL:
            self.mail.arrived(peer, header, payload)
        elif header.size <= INLINE_WORK_BYTES:
            self._checked(peer, header, payload, matches(payload, header.digest))
        else:
            tag = (self._checked_later, (peer, header, payload))
            self.workers.submit(header.seq, tag, lambda: matches(payload, header.digest))

    def _checked_later(self, chunk: tuple[PeerId, ChunkHeader, memoryview], good: bool) -> None:
        peer, header, payload = chunk
        if good and not self.core.accepts(peer, header):  # a copy was faster, or the op is over
            self.feed(ChunkReceived(peer, header))
        else:
            self._checked(peer, header, payload, good)

    def _checked(self, peer: PeerId, header: ChunkHeader, payload: memoryview, good: bool) -> None:
        if not good:
            log.warning("a chunk of op %d from %s does not match its digest: dropped", header.seq, peer)
            self.feed(ChunkRejected(peer, header))
            return
        opened = self.ops.get((header.gid, header.seq))
        if opened is not None and opened.plan.descriptor.digest(header.seq)[:8] != header.descriptor:
            self.feed(ChunkReceived(peer, header))  # of another op than ours: only to be heard of
            return
        try:
            kept = self.plane.put_chunk(
                header.gid, header.seq, header.role, header.part, header.index, payload
            )
        except WireError as error:
            self.fabric.rejected(peer, error)
            kept = False
        if kept:
            self.feed(ChunkReceived(peer, header))
        else:  # never received, as far as ops go; but it has left the link
            self.core.stats.drops += 1
            effects: list[Effect] = []
            self.core.transfer.took(peer, header, effects)
            self._carry_out(effects)

    def _send_chunk(self, effect: SendChunk) -> None:
        try:
            if effect.header.role == Role.MAIL:
                payload = self.mail.buffers.payload(effect.header, self.core.settings.chunk_bytes)
            else:
                payload = self.plane.payload(effect.header)
        except LookupError:  # the op failed a moment ago, in the same list of effects
            self.core.stats.drops += 1
            return
        self.fabric.send_chunk(effect.peer, effect.header, payload)

    # ----------------------------------------------------------------------- ops
    def _open(self, effect: OpenOp) -> None:
        try:
            self.plane.open(effect.gid, effect.seq, effect.plan, effect.host)
        except StoreFull as error:
            self._break(effect.gid, effect.seq, error)
        else:
            self.ops[effect.gid, effect.seq] = effect

    def _make_part(self, effect: MakePart) -> None:
        opened = self.ops.get((effect.gid, effect.seq))
        if opened is None:
            return
        plan = opened.plan
        span = plan.cuts[effect.part][effect.span]
        work = (span.stop - span.start) * len(plan.parts[effect.part].ranks)
        plane = self.plane
        self._work(
            effect,
            work,
            lambda: plane.make_part(effect.gid, effect.seq, effect.part, effect.span, effect.leaves),
        )

    def _fold(self, effect: Fold) -> None:
        opened = self.ops.get((effect.gid, effect.seq))
        if opened is None:
            return
        plan = opened.plan
        start, stop = plan.bounds(effect.piece)
        work = (stop - start) * plan.fan_in
        plane = self.plane
        self._work(effect, work, lambda: plane.fold(effect.gid, effect.seq, effect.piece, effect.leaves))

    def _work(self, effect: MakePart | Fold, size: int, task: Callable[[], Digest | None]) -> None:
        if size > INLINE_WORK_BYTES:
            self.workers.submit(effect.seq, (self._worked, effect), task)
            return
        try:
            digest = task()
        except (LookupError, WireError) as error:
            self._break(effect.gid, effect.seq, error)
        else:
            self._worked(effect, digest)

    def _worked(self, effect: MakePart | Fold, digest: Digest | None) -> None:
        if (effect.gid, effect.seq) not in self.ops:
            return  # closed meanwhile: nothing was done
        if isinstance(effect, MakePart):
            self.feed(PartMade(effect.gid, effect.seq, effect.part, effect.span, digest))
        else:
            self.feed(Folded(effect.gid, effect.seq, effect.piece, digest))

    def work_done(self) -> None:
        """Take what the workers have finished."""
        for (done, subject), value, error in self.workers.finished():
            if error is None:
                done(subject, value)
            elif isinstance(error, (LookupError, WireError)) and isinstance(subject, (MakePart, Fold)):
                self._break(subject.gid, subject.seq, error)
            else:
                raise error

    def _break(self, gid: GroupId, seq: int, error: Exception) -> None:
        """An op cannot be carried out with the bytes that are here: its group ends."""
        group = self.core.groups.get(gid)
        if group is None:
            return
        code = type(error).__name__ if isinstance(error, FrogError) else "IntegrityError"
        effects: list[Effect] = []
        group.fail(seq, code, f"machine {self.core.me.name}, op {seq}: {error}", self.clock(), effects)
        self._carry_out(effects)

    def _fold_solo(self, effect: FoldSolo) -> None:
        gid, seq, plan = effect.gid, effect.seq, effect.plan
        try:
            results = self.plane.fold_solo(gid, seq, plan)
        except (LookupError, WireError) as error:
            self._break(gid, seq, error)
            return
        flags = wire.FINAL | (wire.NODATA if plan.descriptor.kind == OpKind.BARRIER else wire.INLINE)
        for rank, data in zip(plan.hosts[0].ranks, results, strict=True):
            seat = self.service.seats.get((gid, rank))
            if seat is not None:
                seat.in_flight -= 1
                size = len(data)
                datagram = wire.encode_result(seat.handle, seq, flags, 0, 0, size, size, data)
                self.service.send(seat, datagram)

    def _witness(self, effect: Witness) -> None:
        plane, size = self.plane, sum(stop - start for start, stop in effect.intervals)
        if size <= INLINE_WORK_BYTES:
            self._witnessed(effect, plane.witness(effect.gid, effect.seq, effect.intervals))
            return
        priority = effect.seq if effect.urgent else effect.seq + RECEIPT_LATER
        task = partial(plane.witness, effect.gid, effect.seq, effect.intervals)
        self.workers.submit(priority, (self._witnessed, effect), task)

    def _witnessed(self, effect: Witness, roots: list[Digest] | None) -> None:
        if roots is not None:
            self.feed(Witnessed(effect.gid, effect.seq, roots))

    def _verified(self, effect: Verified) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        if seat is not None:
            self.service.send(seat, wire.encode_verified(seat.handle, effect.seq))

    def _close(self, effect: CloseOp) -> None:
        self.ops.pop((effect.gid, effect.seq), None)
        for rank in self.plane.close(effect.gid, effect.seq):
            self.service.freed(effect.gid, effect.seq, rank)

    # --------------------------------------------------------------------- ranks
    def _deliver(self, effect: Deliver) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        if seat is None:
            return
        if effect.upto >= 0 and (effect.gid, effect.seq) not in self.ops:
            return  # the op could not be opened, or broke, earlier in the same list of effects
        if effect.final:
            seat.in_flight -= 1
        seq, upto = effect.seq, effect.upto
        if upto < 0:
            datagram = wire.encode_result(seat.handle, seq, wire.NODATA | wire.FINAL, 0, 0, 0, 0)
        else:
            result = self.plane.result(effect.gid, seq, effect.rank)
            if result.inline is not None:
                if not effect.final:
                    return
                flags, size = wire.INLINE | wire.FINAL, len(result.inline)
                datagram = wire.encode_result(seat.handle, seq, flags, 0, 0, size, size, result.inline)
            else:
                flags = wire.FINAL if effect.final else 0
                datagram = wire.encode_result(
                    seat.handle, seq, flags, result.seg, result.off, upto, result.total
                )
        self.service.send(seat, datagram)

    def _joined(self, effect: Joined) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        if seat is not None:
            seat.joined = True
            self.service.send_json(seat, wire.Joined(handle=seat.handle))

    def _note(self, effect: Note) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        if seat is not None:
            self.service.send_json(seat, wire.Note(handle=seat.handle, text=clip(effect.text, EXPLAIN_CHARS)))

    def _fail(self, effect: Fail) -> None:
        seat = self.service.seats.get((effect.gid, effect.rank))
        log.warning("rank %d: ops from %d on fail: %s", effect.rank, effect.seq, effect.text)
        if seat is not None:
            seat.in_flight = 0
            text = clip(effect.text, EXPLAIN_CHARS)
            self.service.send_json(
                seat, wire.Failed(handle=seat.handle, seq=effect.seq, code=effect.code, text=text)
            )

    def _close_group(self, effect: CloseGroup) -> None:
        for seq, freed in self.plane.close_group(effect.gid).items():
            self.ops.pop((effect.gid, seq), None)
            for rank in freed:
                self.service.freed(effect.gid, seq, rank)
        self.mail.forget(effect.gid)
        log.info("group %s is over here", effect.gid.hex()[:8])

    # --------------------------------------------------------------------- links
    def _send(self, effect: Send) -> None:
        self.fabric.send(effect.peer, effect.message)

    def _send_link(self, effect: SendLink) -> None:
        self.fabric.send_link(effect.endpoint, effect.message)

    def _reply(self, effect: Reply) -> None:
        self.fabric.reply(effect.route, effect.message)

    def _publish(self, effect: Publish) -> None:
        self.fabric.publish(effect.message)

    def _dial(self, effect: Dial) -> None:
        self.fabric.dial(effect.endpoint, effect.key)

    def _hangup(self, effect: Hangup) -> None:
        self.fabric.hangup(effect.endpoint)

    def _attach(self, effect: Attach) -> None:
        self.fabric.attach(effect.peer, effect.endpoint, effect.pub_endpoint)

    def _peer_up(self, effect: PeerUp) -> None:
        link = self.fabric.attached.get(effect.peer)
        where = f"{link.endpoint} ({'encrypted' if link.key else 'plain'})" if link is not None else "?"
        log.info("peer %s is up at %s", self._name(effect.peer), where)

    def _peer_down(self, effect: PeerDown) -> None:
        log.warning("peer %s is down: %s", self._name(effect.peer), effect.reason)

    def _name(self, peer: PeerId) -> str:
        who = self.core.peers.who(peer)
        return f"{who.name} ({peer})" if who is not None else str(peer)

    # -------------------------------------------------------------------- ending
    def farewell(self, reason: str) -> None:
        """Tell peers and ranks that this peer stops."""
        text = clip(f"the peer of machine {self.core.me.name} stops: {reason}")
        self.service.fail_all(text)
        for peer in list(self.fabric.attached):
            self.fabric.send(peer, Bye(reason=clip(reason)))
