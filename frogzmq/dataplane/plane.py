"""The data plane: where the bytes of every op in flight stand, and who may touch them when.

The core decides with digests and sizes only; the driver has its effects carried out here. ``open``,
``put_input``, ``put_chunk``, ``payload``, ``result`` and ``close`` belong to one thread; ``make_part`` and
``fold`` may run in any number of others (distinct spans never overlap, and ``close`` waits for the calls
that are running).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from frogzmq.content.manifest import tensor_root
from frogzmq.dataplane.opbuffers import EMPTY, Buffer, Bytes, OpBuffers, as_bytes
from frogzmq.dtypes import dtype_of
from frogzmq.errors import StoreFull, WireError
from frogzmq.fold.gloo import fold_ring
from frogzmq.fold.kernels import fold_into
from frogzmq.plan.plan import JOINED, Plan
from frogzmq.store.arena import Arena
from frogzmq.store.index import Extent
from frogzmq.store.place import available_memory
from frogzmq.types import Digest, GroupId, ReduceOp
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.messages import ChunkHeader

OWNER = "results"
"""Name under which results are leased."""
EARLY_BYTES = 256 << 20
"""Chunks of ops that no local rank has called yet, all together: what comes beyond is refused."""
EARLY_CHUNKS = 1 << 14
"""The same in number, for chunks of few bytes."""
MEMORY_SHARE = 0.75
CLOSE_WAIT_S = 60.0
"""A call that still folds one span after this long will never end."""

_Key: TypeAlias = tuple[GroupId, int]


class Result(NamedTuple):
    """Where a result stands: ``inline`` bytes, or ``total`` bytes at ``off`` of arena segment ``seg``.

    ``inline`` is set for results of at most ``INLINE_BYTES``, and only then. ``seg`` is -1 where the bytes
    are in neither (a data plane without an arena): see ``DataPlane.result_bytes``.
    """

    inline: bytes | None
    seg: int
    off: int
    total: int


def _dealt(plan: Plan, inputs: dict[int, Bytes]) -> list[bytes]:
    """Results of an op of one machine that moves bytes and folds none."""
    assert plan.layout is not None
    pieces, known = plan.layout.pieces, {}
    for interval in plan.layout.intervals.values():
        if interval not in known:
            rows = pieces[interval.first : interval.last]
            spans = [(plan.parts[row.part].ranks[0], plan.cuts[row.part][row.span]) for row in rows]
            known[interval] = b"".join(
                inputs[rank][s.start : s.stop].tobytes() for rank, s in spans if rank in inputs
            )
    return [known[plan.layout.intervals[rank]] for rank in plan.hosts[0].ranks]


class DataPlane:
    """Buffers of all ops in flight on one machine, by (group, op number).

    ``arena``: where results stand that ranks read; None: on the heap (simulator). ``max_bytes`` bounds the
    heap that open ops may come to need (default: 75 % of the memory available now).
    """

    def __init__(self, arena: Arena | None, *, max_bytes: int | None = None, early_bytes: int = EARLY_BYTES):
        self._arena = arena
        self._max_bytes = int(available_memory() * MEMORY_SHARE) if max_bytes is None else max_bytes
        self._early_limit = early_bytes
        self._early_bytes = self._early_chunks = 0
        self._reserved = 0
        self._ops: dict[_Key, OpBuffers] = {}
        self._extents: dict[_Key, Extent] = {}
        self._idle = threading.Condition()

    # ------------------------------------------------------------- the op's life
    def open(self, gid: GroupId, seq: int, plan: Plan, host: int) -> None:
        """Make room for op ``seq``; place what came early. ``StoreFull`` where there is no room."""
        op = self._entry(gid, seq)
        assert op.plan is None, f"op {seq} is opened twice"
        op.begin(plan, host)
        needed = op.retained_at_most()
        if self._reserved + needed > self._max_bytes:
            op.plan = None
            raise StoreFull(
                f"{plan.descriptor.describe()} may need {needed} bytes of memory in this peer, and "
                f"{self._reserved} of {self._max_bytes} are promised to other operations; keep fewer or "
                "smaller operations in flight, or give the machine more memory"
            )
        if plan.needs(host) and not op.aliased:
            try:
                op.result = self._room(gid, seq, plan.result_nbytes(host), op.largest)
            except StoreFull:
                op.plan = None
                raise
        op.reserved = needed
        self._reserved += needed
        op.settle()
        early, op.early = op.early, {}
        self._forget_early(op, len(early))
        for (role, part, index), data in early.items():
            try:
                op.place(role, part, index, data)
            except WireError:
                continue  # nobody could tell before the plan was known; it counts as not received

    def put_input(self, gid: GroupId, seq: int, rank: int, buf: Buffer, *, leased: bool = True) -> None:
        """The contribution of a local rank: an arena view (of which more may be written later), or bytes.

        Writable buffers may be folded into in place. ``leased``: it may be an arena view (False saves
        looking, for what came inline). Before or after ``open``.
        """
        op = self._entry(gid, seq)
        data = as_bytes(buf)
        op.inputs[rank] = data
        if leased and self._arena is not None and len(data) and self._arena.locate(data) is not None:
            op.in_arena.append(rank)
        if op.plan is not None:
            op.settle()

    def put_chunk(self, gid: GroupId, seq: int, role: int, part: int, index: int, buf: Buffer) -> bool:
        """Keep a verified chunk of another machine, before or after ``open``; the buffer is kept, not copied.

        False: refused, because chunks of ops not called here fill their bound; treat it as never received.
        ``WireError`` where the op has no such chunk.
        """
        op = self._entry(gid, seq)
        data = as_bytes(buf)
        if op.plan is not None:
            op.place(role, part, index, data)
            return True
        full = self._early_bytes + len(data) > self._early_limit or self._early_chunks >= EARLY_CHUNKS
        if full and (role, part, index) not in op.early:
            if not op.inputs and not op.early:
                del self._ops[gid, seq]
            return False
        if (role, part, index) not in op.early:
            op.early[role, part, index] = data
            op.early_bytes += len(data)
            self._early_bytes += len(data)
            self._early_chunks += 1
        return True

    def close(self, gid: GroupId, seq: int) -> list[int]:
        """Free everything of the op; the local ranks whose arena contribution is no longer used.

        Waits for ``make_part`` and ``fold`` calls that are running; later ones do nothing.
        """
        op = self._ops.pop((gid, seq), None)
        if op is None:
            return []
        with self._idle:
            op.closed = True
            ended = self._idle.wait_for(lambda: op.busy == 0, CLOSE_WAIT_S)
        assert ended, f"op {seq} is still being folded"
        self._forget_early(op, len(op.early))
        self._reserved -= op.reserved
        extent = self._extents.pop((gid, seq), None)
        if extent is not None and self._arena is not None:
            self._arena.release(extent)
        return op.in_arena

    def close_group(self, gid: GroupId) -> dict[int, list[int]]:
        """``close`` whatever is left of a group: op number -> ranks."""
        return {seq: self.close(gid, seq) for of, seq in list(self._ops) if of == gid}

    # ---------------------------------------------------------------- arithmetic
    def fold_solo(self, gid: GroupId, seq: int, plan: Plan) -> list[bytes]:
        """Each rank's result of an op of one machine whose contributions are all here; nothing is kept.

        ``LookupError``: a contribution is not here.
        """
        op = self._ops.pop((gid, seq), None)
        ranks = plan.hosts[0].ranks
        if not plan.result_nbytes(0):
            return [b""] * len(ranks)
        if op is None:
            raise LookupError(f"op {seq} has no contributions here")
        descriptor, inputs = plan.descriptor, op.inputs
        if descriptor.kind not in JOINED:
            return _dealt(plan, inputs)
        out = np.empty(plan.result_nbytes(0), np.uint8)
        divide_by = plan.size if descriptor.reduce == ReduceOp.AVG else 0
        given = [inputs[rank] for rank in ranks]
        if plan.turns:
            _fold_pieces(plan, out, given, divide_by)
        else:
            fold_into(out, given, dtype_of(descriptor.dtype), descriptor.reduce, divide_by)
        whole = out.tobytes()
        if plan.layout is None:
            return [whole] * len(ranks)
        intervals = plan.layout.intervals
        return [whole[intervals[rank].start : intervals[rank].stop] for rank in ranks]

    def make_part(self, gid: GroupId, seq: int, part: int, span: int, leaves: bool) -> Digest | None:
        """Fold the local ranks of ``part`` over ``span``, in place; the digest if it ``leaves``, else None.

        Any thread. None too where the op was closed meanwhile.
        """
        op = self._enter(gid, seq)
        if op is None:
            return None
        try:
            return op.make_part(part, span, leaves)
        finally:
            self._leave(op)

    def fold(self, gid: GroupId, seq: int, piece: int, leaves: bool) -> Digest | None:
        """Fold the sources of ``piece`` into the result; the digest if it ``leaves``, else None.

        Any thread. None too where the op was closed meanwhile. ``LookupError``: a source is not here.
        """
        op = self._enter(gid, seq)
        if op is None:
            return None
        try:
            return op.fold(piece, leaves)
        finally:
            self._leave(op)

    def witness(self, gid: GroupId, seq: int, intervals: Sequence[tuple[int, int]]) -> list[Digest] | None:
        """Roots of intervals of the op's result as it stands now; None: the op was closed. Any thread."""
        op = self._enter(gid, seq)
        if op is None:
            return None
        try:
            whole = EMPTY if op.result is None else op.result
            return [tensor_root(whole[start:stop]) for start, stop in intervals]
        finally:
            self._leave(op)

    # ------------------------------------------------------------------- reading
    def payload(self, header: ChunkHeader) -> Bytes:
        """The bytes of a chunk to send, not copied: valid until ``close``. ``LookupError``: not here."""
        op = self._ops.get((header.gid, header.seq))
        found = None if op is None else op.chunk(header.role, header.part, header.index)
        if found is None:
            raise LookupError(f"op {header.seq} has no {header.role.name} {header.part}, {header.index} here")
        return found

    def has(self, gid: GroupId, seq: int, role: int, part: int, index: int) -> bool:
        """Whether ``payload`` could name the chunk's bytes."""
        op = self._ops.get((gid, seq))
        return op is not None and op.has(role, part, index)

    def result(self, gid: GroupId, seq: int, rank: int) -> Result:
        """Where the result of a local rank stands. Inline bytes are final: ask when they are folded.

        ``LookupError``: this machine has none.
        """
        op = self._ops[gid, seq]
        whole = self.result_bytes(gid, seq)
        start, stop = op.interval(rank)
        total = stop - start
        if total <= INLINE_BYTES:
            inline = op.inline.get((start, stop))
            if inline is None:
                inline = op.inline[start, stop] = whole[start:stop].tobytes()
            return Result(inline, 0, 0, total)
        extent = self._extents.get((gid, seq))
        if extent is not None:
            return Result(None, extent.seg, extent.off + start, total)
        where = None if self._arena is None else self._arena.locate(whole)
        seg, off = where or (-1, 0)
        return Result(None, seg, off + start, total)

    def result_bytes(self, gid: GroupId, seq: int) -> Bytes:
        """This machine's result, not copied: valid until ``close``. ``LookupError``: it has none."""
        op = self._ops[gid, seq]
        if op.result is None:
            raise LookupError(f"op {seq} has no result on this machine")
        return op.result

    def usage(self) -> dict[str, int]:
        """Ops in flight, heap bytes held, heap bytes promised to open ops, and bytes of early chunks."""
        return {
            "ops": len(self._ops),
            "heap_bytes": sum(op.heap_bytes() for op in self._ops.values()),
            "reserved_bytes": self._reserved,
            "early_bytes": self._early_bytes,
            "max_bytes": self._max_bytes,
        }

    # ------------------------------------------------------------------- helpers
    def _entry(self, gid: GroupId, seq: int) -> OpBuffers:
        op = self._ops.get((gid, seq))
        if op is None:
            op = self._ops[gid, seq] = OpBuffers()
        return op

    def _enter(self, gid: GroupId, seq: int) -> OpBuffers | None:
        op = self._ops.get((gid, seq))
        if op is None:
            return None
        with self._idle:
            if op.closed:
                return None
            op.busy += 1
        return op

    def _leave(self, op: OpBuffers) -> None:
        with self._idle:
            op.busy -= 1
            if op.closed:
                self._idle.notify_all()

    def _room(self, gid: GroupId, seq: int, size: int, largest: int) -> Bytes:
        """Where a result goes: where all that ranks read travels inline, it needs no shared memory."""
        if self._arena is None or largest <= INLINE_BYTES:
            return np.empty(size, np.uint8)
        extent = self._arena.lease(OWNER, size)
        self._extents[gid, seq] = extent
        return self._arena.view(extent.seg, extent.off, size)

    def _forget_early(self, op: OpBuffers, count: int) -> None:
        self._early_bytes -= op.early_bytes
        self._early_chunks -= count
        op.early_bytes = 0


def _fold_pieces(plan: Plan, out: Bytes, given: list[Bytes], divide_by: int) -> None:
    """An op of one machine in an order that differs from piece to piece; ``given`` by part."""
    descriptor = plan.descriptor
    for piece in range(plan.pieces):
        start, stop = plan.bounds(piece)
        sources = plan.sources(piece)
        span = plan.spans[sources[0][1]]
        inputs = [given[part][span.start : span.stop] for part, _ in sources]
        fold_ring(out[start:stop], inputs, dtype_of(descriptor.dtype), descriptor.reduce, divide_by)
