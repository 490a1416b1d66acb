"""One collective on one machine, from the first call to the last byte.

Theory of operation
-------------------
Local ranks post; as soon as every rank of a local part has written a span, the part chunk is made
(``MakePart``) and pushed to the machines that fold it. A piece whose sources have all been observed is
folded (``Fold``); its owner hands it to the receivers. Local ranks are told how long a prefix of what they
read is there; ranks that read the same interval of the result share a *lane*. The op is *complete* here
when this machine owes nothing and lacks nothing; it is *closed* by its group when no other machine can
still ask for its bytes.

Rules for editors: no clock, no payload bytes, no iteration over sets. Every method appends to ``out``.
Chunks only ever go from absent to present, so arrivals commute: the order of events changes effects'
order, never the result.
"""

from __future__ import annotations

from frogzmq.descriptor import Descriptor
from frogzmq.machine import Deliver, Effect, Fold, FoldSolo, MakePart, OpenOp, SendChunk
from frogzmq.plan.plan import Part, Plan
from frogzmq.proto.view import Lane, View
from frogzmq.types import Digest, GroupId, PeerId, Role
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.messages import ChunkHeader

DELIVER_BYTES = 2 << 20
"""A rank is told of a longer prefix in steps of this size: fewer messages, still overlapped copies."""

Key = tuple[int, int, int]
"""(role, part, index): one chunk of an op."""


class Op:
    """State of op ``seq`` of a group on host ``here`` (an index into the plan's hosts)."""

    __slots__ = (
        "asked", "complete", "delivered", "descriptor", "early", "early_tags", "final", "gid", "have",
        "held", "here", "hold", "holders", "missing", "next_span", "observed", "opened_at", "part_left",
        "parts_left", "piece_done", "pieces_left", "plan", "posted", "prefix", "ready", "rejects",
        "repair_at", "repair_wait", "seq", "tag", "unconsumed", "unheard", "view", "watched", "witness",
    )  # fmt: skip

    def __init__(self, gid: GroupId, seq: int, here: int, now: float, repair_after: float) -> None:
        self.gid, self.seq, self.here, self.opened_at = gid, seq, here, now
        self.view: View | None = None
        self.plan: Plan | None = None
        self.descriptor: Descriptor | None = None
        self.tag = b""
        self.posted: dict[int, float] = {}
        self.ready: dict[int, int] = {}
        self.next_span: dict[int, int] = {}
        self.have: dict[tuple[int, int], Digest | None] = {}
        self.early: dict[Key, ChunkHeader] = {}
        self.early_tags: dict[int, bytes] = {}
        self.missing: list[int] = []
        self.piece_done = bytearray()
        self.parts_left = self.pieces_left = self.unheard = 0
        self.prefix: list[int] = []
        """For each lane, the first piece that is not there."""
        self.part_left: dict[int, int] = {}
        self.observed: list[tuple[tuple[int, ...], int, float]] = []
        self.delivered: dict[int, int] = {}
        self.final: set[int] = set()
        self.unconsumed: set[int] = set()
        self.complete = False
        self.witness = self.watched = False
        """Whether a receipt is to be taken; whether it is due, so that the op's bytes have to stay."""
        self.hold = False
        """Whether ranks that only give have to wait before they are told that they are done."""
        self.held: list[int] = []
        self.repair_wait = repair_after
        self.repair_at = now + repair_after
        self.rejects: dict[Key, list[int]] = {}
        self.asked: dict[int, int] = {}
        """How often chunks that a machine owes were asked for, there or elsewhere."""
        self.holders: dict[int, set[int]] = {}
        """Part -> machines that announced all of it: see ``proto.holding``."""

    # ------------------------------------------------------------------ opening
    def open(self, descriptor: Descriptor, view: View, now: float, out: list[Effect]) -> None:
        """The first local rank called the op: its plan is known from now on."""
        plan = self.plan = view.plan
        self.descriptor, self.view = descriptor, view
        if not view.solo:
            self.tag = descriptor.digest(self.seq)[:8]
        self.parts_left, self.pieces_left, self.unheard = view.parts_left, view.pieces_left, view.unheard
        self.piece_done = bytearray(plan.pieces)
        if view.solo:
            return
        self.next_span = dict.fromkeys(view.targets, 0)
        self.prefix = [lane.first for lane in view.lanes]
        self.missing, self.part_left = view.missing.copy(), view.part_left.copy()
        out.append(OpenOp(self.gid, self.seq, plan, self.here))
        early, self.early = self.early, {}
        for header in early.values():
            if self.wanted(header):  # nobody could tell before the plan was known
                self.arrived(header, now, out)

    def handed_over(self, rank: int) -> bool:
        """Whether everything that the op needs of a local rank is in this machine's hands."""
        if rank not in self.posted:
            return False
        assert self.view is not None
        return rank not in self.view.part_of or self.ready[rank] >= self.view.gives[rank]

    def forget(self, rank: int) -> None:
        """A local rank is gone: what it gave stays, it gets nothing more and need not say that it read it."""
        self.delivered.pop(rank, None)
        self.unconsumed.discard(rank)

    # ------------------------------------------------------------- contributions
    def post(self, rank: int, ready: int, now: float, out: list[Effect]) -> None:
        """A local rank called the op (which is open)."""
        view = self.view
        assert view is not None
        if view.solo:
            self._post_solo(rank, view, now, out)
            return
        self.posted[rank] = now - self.opened_at
        self.ready[rank] = 0
        self.delivered[rank] = -1
        self.more(rank, ready, now, out)
        for lane, prefix in zip(view.lanes, self.prefix, strict=True):
            if rank in lane.ranks and (prefix > lane.first or prefix == lane.last):
                self._deliver(rank, lane, prefix, out)

    def _post_solo(self, rank: int, view: View, now: float, out: list[Effect]) -> None:
        """Everything that the rank gives came with its call; the last call completes the op."""
        at = self.posted[rank] = now - self.opened_at
        self.ready[rank] = view.gives[rank]
        self.observed.append(((rank,), self.here, at))
        if len(self.posted) == len(view.plan.hosts[0].ranks):
            self.parts_left = self.pieces_left = 0
            self.complete = True
            self.final.update(self.posted)
            out.append(FoldSolo(self.gid, self.seq, view.plan))

    def more(self, rank: int, ready: int, now: float, out: list[Effect]) -> None:
        """The first ``ready`` bytes of a local rank's contribution can be read."""
        view, plan = self.view, self.plan
        assert view is not None
        assert plan is not None
        part = view.part_of.get(rank)
        if part is None or ready < self.ready[rank]:
            return
        self.ready[rank] = ready
        whole = ready >= view.gives[rank]
        if whole:
            self.observed.append(((rank,), self.here, now - self.opened_at))
            if rank in view.alone and rank not in view.reads:
                self.done(rank, out)
        self._make(part, view, now, out)
        if whole and view.plan.layout is not None:
            self._deliver_all(view, out)  # its result may be there already, and waited for this

    def _make(self, part: Part, view: View, now: float, out: list[Effect]) -> None:
        ready, low = self.ready, view.gives[part.ranks[0]]
        for rank in part.ranks:
            if rank not in ready:
                return
            low = min(low, ready[rank])
        spans, targets = view.spans[part.index], view.targets[part.index]
        several = len(part.ranks) > 1
        index = self.next_span[part.index]
        while index < len(spans) and spans[index].stop <= low:
            leaves = self.witness or bool(targets[index])
            if leaves or several:
                out.append(MakePart(self.gid, self.seq, part.index, index, leaves))
            else:
                self._made(part.index, index, None, now, out)
            index += 1
        self.next_span[part.index] = index

    def part_made(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        """A local part chunk is folded and hashed: push it, and count it as observed here."""
        view, plan = self.view, self.plan
        assert view is not None
        assert plan is not None
        for host in view.targets[part][span]:
            assert digest is not None
            out.append(self._chunk(plan.hosts[host].peer, Role.PART, part, span, digest))
        self._made(part, span, digest, now, out)

    def _made(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        self.parts_left -= 1
        self._observe(part, span, digest, now, out)
        self._check_complete()

    # ------------------------------------------------------------------ arrivals
    def arrived(self, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A verified chunk from another machine (``wanted`` said yes to it)."""
        if self.plan is None:
            self.early[int(header.role), header.part, header.index] = header
            return
        if header.role == Role.PART:
            self._observe(header.part, header.index, header.digest, now, out)
        else:
            self.have[-1, header.index] = header.digest
            self._piece(header.index, out)
        self._check_complete()

    def wanted(self, header: ChunkHeader) -> bool:
        """Whether a chunk is one that this machine lacks; False: a duplicate, or nothing it was due."""
        key = (int(header.role), header.part, header.index)
        plan = self.plan
        if plan is None or self.view is None:
            return key not in self.early
        if header.descriptor != self.tag:
            return False
        if header.role == Role.PART:
            if header.part >= len(plan.parts) or header.index >= len(plan.cuts[header.part]):
                return False
            span = plan.cuts[header.part][header.index]
            due = self.view.folds[plan.piece_of(header.part, header.index)]
            foreign = plan.parts[header.part].host != self.here
            return (
                due
                and foreign
                and header.size == span.stop - span.start
                and (key[1], key[2]) not in self.have
            )
        if header.index >= plan.pieces or not self.view.receives[header.index]:
            return False
        start, stop = plan.bounds(header.index)
        return header.size == stop - start and not self.piece_done[header.index]

    def _observe(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        view, plan = self.view, self.plan
        assert view is not None
        assert plan is not None
        self.have[part, span] = digest
        piece = plan.piece_of(part, span)
        if not view.folds[piece]:
            return
        left = self.part_left[part] = self.part_left[part] - 1
        if self.unheard and left == view.part_left[part] - 1:
            self.unheard -= 1
            if not self.unheard:
                self._deliver_all(view, out)
        owner = plan.parts[part]
        if left == 0 and owner.host != self.here:
            self.observed.append((owner.ranks, owner.host, now - self.opened_at))
        self.missing[piece] -= 1
        if self.missing[piece] == 0:
            out.append(Fold(self.gid, self.seq, piece, bool(view.hands_out[piece])))

    # ------------------------------------------------------------------- results
    def folded(self, piece: int, digest: Digest | None, out: list[Effect]) -> None:
        """A piece stands in the result here; hand it out if that is ours to do."""
        view, plan = self.view, self.plan
        assert view is not None
        assert plan is not None
        if digest is not None:
            peers = [plan.hosts[host].peer for host in view.hands_out[piece]]
            out.extend(self._chunk(peer, Role.RESULT, 0, piece, digest) for peer in peers)
            self.have[-1, piece] = digest
        self._piece(piece, out)
        self._check_complete()

    def _piece(self, piece: int, out: list[Effect]) -> None:
        view = self.view
        assert view is not None
        self.piece_done[piece] = 1
        self.pieces_left -= 1
        index = view.lane_of[piece]
        if piece != self.prefix[index]:
            return
        lane = view.lanes[index]
        gap = self.piece_done.find(0, piece, lane.last)
        prefix = self.prefix[index] = lane.last if gap < 0 else gap
        for rank in lane.ranks:
            if rank in self.delivered:
                self._deliver(rank, lane, prefix, out)

    def _deliver_all(self, view: View, out: list[Effect]) -> None:
        """What kept ranks from being handed what is there may be over."""
        for lane, prefix in zip(view.lanes, self.prefix, strict=True):
            for rank in lane.ranks:
                if rank in self.delivered:
                    self._deliver(rank, lane, prefix, out)

    def _deliver(self, rank: int, lane: Lane, prefix: int, out: list[Effect]) -> None:
        view, plan = self.view, self.plan
        assert view is not None
        assert plan is not None
        if rank in self.final or self.unheard:
            return
        if prefix == lane.last:
            # A rank whose op is done stops copying: what it gives must be here.
            if self.handed_over(rank):
                self.done(rank, out)
            return
        if rank not in view.reads:
            return
        upto = plan.bounds(prefix)[0] - lane.start
        if upto - max(self.delivered[rank], 0) >= DELIVER_BYTES:
            self.delivered[rank] = upto
            out.append(Deliver(self.gid, self.seq, rank, upto, False))

    def done(self, rank: int, out: list[Effect]) -> None:
        """Nothing keeps a rank any more, unless it needs nobody and has run ahead of the others."""
        view = self.view
        assert view is not None
        if self.hold and rank in view.alone:
            self.held.append(rank)
        else:
            self.finish(rank, out)

    def finish(self, rank: int, out: list[Effect]) -> None:
        """Tell a rank that its result, if it gets any, is complete."""
        view = self.view
        assert view is not None
        if rank in self.final:
            return
        self.final.add(rank)
        interval = view.reads.get(rank)
        upto = -1 if interval is None else interval.stop - interval.start
        if upto > INLINE_BYTES and rank in self.delivered:  # else it is gone
            self.unconsumed.add(rank)
        out.append(Deliver(self.gid, self.seq, rank, upto, True))

    def _check_complete(self) -> None:
        if self.parts_left == 0 and self.pieces_left == 0:
            self.complete = True

    def _chunk(self, peer: PeerId, role: Role, part: int, index: int, digest: Digest) -> SendChunk:
        plan = self.plan
        assert plan is not None
        if role == Role.PART:
            span = plan.cuts[part][index]
            size = span.stop - span.start
        else:
            start, stop = plan.bounds(index)
            size = stop - start
        header = ChunkHeader(self.gid, self.seq, role, part, index, size, digest, self.tag, 0)
        return SendChunk(peer, header)

    # -------------------------------------------------------------------- repair
    def lacking(self) -> dict[int, list[Key]]:
        """Chunks from other machines that are still to come, by the host that owes them."""
        plan, view, here = self.plan, self.view, self.here
        lacking: dict[int, list[Key]] = {}
        if plan is None or view is None:
            return lacking
        for piece in range(plan.pieces):
            if self.piece_done[piece]:
                continue
            if view.folds[piece]:
                for part, span in plan.sources(piece):
                    host = plan.parts[part].host
                    if host != here and (part, span) not in self.have:
                        lacking.setdefault(host, []).append((int(Role.PART), part, span))
            elif view.receives[piece]:
                lacking.setdefault(plan.sender(piece), []).append((int(Role.RESULT), 0, piece))
        return lacking

    def resend(self, key: Key, peer: PeerId, out: list[Effect]) -> bool:
        """Another machine asks for a chunk: send it if it is here, whoever made it."""
        role, part, index = key
        plan = self.plan
        if plan is None:
            return False
        digest = self.have.get((part, index) if role == Role.PART else (-1, index))
        if digest is None and role == Role.RESULT and index < plan.pieces and self.piece_done[index]:
            sources = plan.sources(index)
            digest = self.have.get(sources[0]) if len(sources) == 1 else None  # the same bytes
        if digest is None:
            return False
        out.append(self._chunk(peer, Role(role), part, index, digest))
        return True

    def absent(self, ranks: tuple[int, ...]) -> list[int]:
        """Local ranks among ``ranks`` that have not handed over what the op needs of them."""
        return [rank for rank in ranks if not self.handed_over(rank)]
