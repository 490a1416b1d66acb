"""One collective on one machine, from the first call to the last byte.

Theory of operation
-------------------
Local ranks post; as soon as every rank of a local part has written a span, the part chunk is made
(``MakePart``) and pushed to the machines that fold it. A piece whose sources have all been observed is
folded (``Fold``); its owner hands it to the receivers. Local ranks are told how long a prefix of the result
they may read. The op is *complete* here when this machine owes nothing and lacks nothing; it is *closed*
by its group when no other machine can still ask for its bytes.

Rules for editors: no clock, no payload bytes, no iteration over sets. Every method appends to ``out``.
Chunks only ever go from absent to present, so arrivals commute: the order of events changes effects'
order, never the result.
"""

from __future__ import annotations

from frogzmq.descriptor import Descriptor
from frogzmq.machine import Deliver, Effect, Fold, MakePart, OpenOp, SendChunk
from frogzmq.plan.plan import Part, Plan
from frogzmq.types import Digest, GroupId, OpKind, PeerId, Role
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.messages import ChunkHeader

DELIVER_BYTES = 4 << 20
"""A rank is told of a longer prefix in steps of this size: fewer messages, still overlapped copies."""

Key = tuple[int, int, int]
"""(role, part, index): one chunk of an op."""


class Op:
    """State of op ``seq`` of a group on host ``here`` (an index into the plan's hosts)."""

    __slots__ = (
        "complete",
        "delivered",
        "descriptor",
        "early",
        "early_tags",
        "final",
        "gid",
        "held",
        "here",
        "local_parts",
        "missing",
        "next_span",
        "observed",
        "opened_at",
        "part_left",
        "parts_left",
        "piece_done",
        "pieces_left",
        "plan",
        "posted",
        "prefix",
        "progress_at",
        "ready",
        "rejects",
        "repair_at",
        "repair_wait",
        "seq",
        "tag",
        "unconsumed",
        "with_data",
    )  # fmt: skip

    def __init__(self, gid: GroupId, seq: int, here: int, now: float, repair_after: float) -> None:
        self.gid, self.seq, self.here, self.opened_at = gid, seq, here, now
        self.plan: Plan | None = None
        self.descriptor: Descriptor | None = None
        self.tag = b""
        self.posted: dict[int, float] = {}
        self.ready: dict[int, int] = {}
        self.local_parts: list[Part] = []
        self.next_span: dict[int, int] = {}
        self.held: dict[tuple[int, int], Digest | None] = {}
        self.early: dict[Key, Digest] = {}
        self.early_tags: dict[int, bytes] = {}
        self.missing: list[int] = []
        self.piece_done = bytearray()
        self.parts_left = self.pieces_left = self.prefix = 0
        self.part_left: dict[int, int] = {}
        self.observed: list[tuple[tuple[int, ...], int, float]] = []
        self.with_data: frozenset[int] = frozenset()
        self.delivered: dict[int, int] = {}
        self.final: set[int] = set()
        self.unconsumed: set[int] = set()
        self.complete = False
        self.progress_at, self.repair_wait = now, repair_after
        self.repair_at = now + repair_after
        self.rejects: dict[Key, list[int]] = {}

    # ------------------------------------------------------------------ opening
    def open(self, descriptor: Descriptor, plan: Plan, now: float, out: list[Effect]) -> None:
        """The first local rank called the op: its plan is known from now on."""
        self.descriptor, self.plan, self.tag = descriptor, plan, descriptor.digest(self.seq)[:8]
        here, spans = self.here, len(plan.spans)
        self.local_parts = [part for part in plan.parts if part.host == here]
        self.next_span = {part.index: 0 for part in self.local_parts}
        self.parts_left = spans * len(self.local_parts)
        self.missing = [0] * plan.pieces
        self.piece_done = bytearray(plan.pieces)
        for piece in range(plan.pieces):
            if here in plan.folders(piece):
                sources = plan.sources(piece)
                self.missing[piece] = len(sources)
                self.pieces_left += 1
                for part, _ in sources:
                    self.part_left[part] = self.part_left.get(part, 0) + 1
            elif here in plan.receivers(piece):
                self.pieces_left += 1
        self.with_data = self._ranks_with_data(plan)
        out.append(OpenOp(self.gid, self.seq, plan, here))
        early, self.early = self.early, {}
        for (role, part, index), digest in early.items():
            self.arrived(role, part, index, digest, now, out)

    def _ranks_with_data(self, plan: Plan) -> frozenset[int]:
        kind, root, local = plan.descriptor.kind, plan.descriptor.root, plan.hosts[self.here].ranks
        if kind == OpKind.BARRIER:
            return frozenset()
        if kind == OpKind.REDUCE:
            return frozenset(r for r in local if r == root)
        if kind == OpKind.BROADCAST:
            return frozenset(r for r in local if r != root)
        return frozenset(local)

    def _contributes(self, rank: int) -> bool:
        assert self.descriptor is not None
        return self.descriptor.kind != OpKind.BROADCAST or rank == self.descriptor.root

    def handed_over(self, rank: int) -> bool:
        """Whether everything that the op needs of a local rank is in this machine's hands."""
        if rank not in self.posted:
            return False
        assert self.descriptor is not None
        return not self._contributes(rank) or self.ready[rank] >= self.descriptor.nbytes

    # ------------------------------------------------------------- contributions
    def post(self, rank: int, ready: int, now: float, out: list[Effect]) -> None:
        """A local rank called the op (which is open)."""
        assert self.plan is not None
        self.posted[rank] = now - self.opened_at
        self.ready[rank] = 0
        self.delivered[rank] = -1
        self.more(rank, ready, now, out)
        self._deliver(rank, out)

    def more(self, rank: int, ready: int, now: float, out: list[Effect]) -> None:
        """The first ``ready`` bytes of a local rank's contribution can be read."""
        plan = self.plan
        assert plan is not None
        if not self._contributes(rank):
            return
        if ready < self.ready[rank]:
            return
        self.ready[rank] = ready
        if ready >= plan.part_nbytes:
            self.observed.append(((rank,), self.here, now - self.opened_at))
            if rank not in self.with_data and plan.descriptor.kind != OpKind.BARRIER:
                self._finish(rank, out)  # handed over: a source, or a rank that is not the root
        for part in self.local_parts:
            if rank in part.ranks:
                self._make(part, now, out)
                break

    def _make(self, part: Part, now: float, out: list[Effect]) -> None:
        plan = self.plan
        assert plan is not None
        ready = self.ready
        low = plan.part_nbytes
        for rank in part.ranks:
            if rank not in ready:
                return
            low = min(low, ready[rank])
        index = self.next_span[part.index]
        spans = plan.spans
        while index < len(spans) and spans[index].stop <= low:
            leaves = bool(plan.part_targets(part.index, index))
            if leaves or len(part.ranks) > 1:
                out.append(MakePart(self.gid, self.seq, part.index, index, leaves))
            else:
                self._made(part.index, index, None, now, out)
            index += 1
        self.next_span[part.index] = index

    def part_made(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        """A local part chunk is folded and hashed: push it, and count it as observed here."""
        plan = self.plan
        assert plan is not None
        for host in plan.part_targets(part, span):
            assert digest is not None
            out.append(self._chunk(plan.hosts[host].peer, Role.PART, part, span, digest))
        self._made(part, span, digest, now, out)

    def _made(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        self.parts_left -= 1
        self._observe(part, span, digest, now, out)
        self._check_complete()

    # ------------------------------------------------------------------ arrivals
    def arrived(
        self, role: int, part: int, index: int, digest: Digest, now: float, out: list[Effect]
    ) -> None:
        """A verified chunk from another machine (``wanted`` said yes to it)."""
        if self.plan is None:
            self.early[role, part, index] = digest
            return
        self.progress_at = now
        if role == Role.PART:
            self._observe(part, index, digest, now, out)
        else:
            self._piece(index, out)
        self._check_complete()

    def wanted(self, header: ChunkHeader) -> bool:
        """Whether a chunk is one that this machine lacks; False: a duplicate, or nothing it was due."""
        key = (int(header.role), header.part, header.index)
        plan = self.plan
        if plan is None:
            return key not in self.early
        if header.role == Role.PART:
            if header.part >= len(plan.parts) or header.index >= len(plan.spans):
                return False
            span = plan.spans[header.index]
            due = self.here in plan.part_targets(header.part, header.index)
            return due and header.size == span.stop - span.start and (key[1], key[2]) not in self.held
        if header.index >= plan.pieces or self.here not in plan.receivers(header.index):
            return False
        start, stop = plan.bounds(header.index)
        return header.size == stop - start and not self.piece_done[header.index]

    def _observe(self, part: int, span: int, digest: Digest | None, now: float, out: list[Effect]) -> None:
        plan = self.plan
        assert plan is not None
        self.held[part, span] = digest
        piece = plan.piece_of(part, span)
        if self.here not in plan.folders(piece):
            return
        left = self.part_left[part] = self.part_left[part] - 1
        owner = plan.parts[part]
        if left == 0 and owner.host != self.here:
            self.observed.append((owner.ranks, owner.host, now - self.opened_at))
        self.missing[piece] -= 1
        if self.missing[piece] == 0:
            leaves = bool(plan.receivers(piece)) and plan.sender(piece) == self.here
            out.append(Fold(self.gid, self.seq, piece, leaves))

    # ------------------------------------------------------------------- results
    def folded(self, piece: int, digest: Digest | None, out: list[Effect]) -> None:
        """A piece stands in the result here; hand it out if that is ours to do."""
        plan = self.plan
        assert plan is not None
        if digest is not None:
            peers = [plan.hosts[host].peer for host in plan.receivers(piece)]
            out.extend(self._chunk(peer, Role.RESULT, 0, piece, digest) for peer in peers)
            self.held[-1, piece] = digest
        self._piece(piece, out)
        self._check_complete()

    def _piece(self, piece: int, out: list[Effect]) -> None:
        plan = self.plan
        assert plan is not None
        self.piece_done[piece] = 1
        self.pieces_left -= 1
        if piece != self.prefix:
            return
        gap = self.piece_done.find(0, piece)
        self.prefix = len(self.piece_done) if gap < 0 else gap
        for rank in plan.hosts[self.here].ranks:
            if rank in self.delivered:
                self._deliver(rank, out)

    def _deliver(self, rank: int, out: list[Effect]) -> None:
        plan = self.plan
        assert plan is not None
        if rank in self.final:
            return
        everything = self.prefix == plan.pieces
        if rank not in self.with_data:
            if everything and plan.descriptor.kind == OpKind.BARRIER:
                self._finish(rank, out)
            return
        if everything:
            if plan.result_nbytes > INLINE_BYTES:
                self.unconsumed.add(rank)
            self.final.add(rank)
            out.append(Deliver(self.gid, self.seq, rank, plan.result_nbytes, True))
            return
        upto = plan.bounds(self.prefix)[0]
        if upto - max(self.delivered[rank], 0) >= DELIVER_BYTES:
            self.delivered[rank] = upto
            out.append(Deliver(self.gid, self.seq, rank, upto, False))

    def _finish(self, rank: int, out: list[Effect]) -> None:
        """A rank that gets no data is done."""
        if rank not in self.final:
            self.final.add(rank)
            out.append(Deliver(self.gid, self.seq, rank, -1, True))

    def _check_complete(self) -> None:
        if self.parts_left == 0 and self.pieces_left == 0:
            self.complete = True

    def _chunk(self, peer: PeerId, role: Role, part: int, index: int, digest: Digest) -> SendChunk:
        plan = self.plan
        assert plan is not None
        if role == Role.PART:
            size = plan.spans[index].stop - plan.spans[index].start
        else:
            start, stop = plan.bounds(index)
            size = stop - start
        header = ChunkHeader(self.gid, self.seq, role, part, index, size, digest, self.tag, 0)
        return SendChunk(peer, header)

    # -------------------------------------------------------------------- repair
    def lacking(self) -> dict[int, list[Key]]:
        """Chunks from other machines that are still to come, by the host that owes them."""
        plan, here = self.plan, self.here
        lacking: dict[int, list[Key]] = {}
        if plan is None:
            return lacking
        for piece in range(plan.pieces):
            if self.piece_done[piece]:
                continue
            if here in plan.folders(piece):
                for part, span in plan.sources(piece):
                    host = plan.parts[part].host
                    if host != here and (part, span) not in self.held:
                        lacking.setdefault(host, []).append((int(Role.PART), part, span))
            elif here in plan.receivers(piece):
                lacking.setdefault(plan.sender(piece), []).append((int(Role.RESULT), 0, piece))
        return lacking

    def resend(self, key: Key, peer: PeerId, out: list[Effect]) -> bool:
        """Another machine asks for a chunk: send it if it is here, whoever made it."""
        role, part, index = key
        plan = self.plan
        if plan is None:
            return False
        digest = self.held.get((part, index) if role == Role.PART else (-1, index))
        if digest is None:
            return False
        out.append(self._chunk(peer, Role(role), part, index, digest))
        return True

    def absent(self, ranks: tuple[int, ...]) -> list[int]:
        """Local ranks among ``ranks`` that have not handed over what the op needs of them."""
        return [rank for rank in ranks if not self.handed_over(rank)]
