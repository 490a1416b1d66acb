"""The buffers of one op on one machine, and the arithmetic on them.

What is copied and what is not:

* a contribution stays where the rank wrote it; a part of several ranks is folded in place there,
* with one machine, the result of a reduction is folded in place into the lowest rank's contribution,
* on the machine of the root of a broadcast or scatter the result *is* the contribution,
* chunks received of contributions stay in the buffer they came in until the op is closed, because a third
  machine may ask for them; those that stand unchanged in the result are served from there.

``make_part`` and ``fold`` run in worker threads, on spans that no other call touches; everything else runs
in the thread that owns the data plane.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from frogzmq.content.chunks import digest_chunk
from frogzmq.dtypes import dtype_of
from frogzmq.errors import WireError
from frogzmq.fold.gloo import fold_ring
from frogzmq.fold.kernels import fold_into
from frogzmq.plan.plan import FOLDING, Plan
from frogzmq.types import Digest, Mode, OpKind, ReduceOp, Role

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview | Bytes
ChunkKey: TypeAlias = tuple[int, int, int]
"""(role, part, index)."""

EMPTY: Bytes = np.empty(0, np.uint8)


def as_bytes(buf: Buffer) -> Bytes:
    """A uint8 vector over ``buf``, without a copy; read-only where ``buf`` is."""
    if isinstance(buf, np.ndarray):
        return buf
    return np.frombuffer(buf, np.uint8) if len(buf) else EMPTY


class OpBuffers:
    """State of one op: first what came early, then (``plan`` set) the op itself."""

    __slots__ = (
        "aliased", "busy", "chunks", "closed", "done", "dtype", "early", "early_bytes", "folds", "host",
        "in_arena", "inline", "inputs", "largest", "made", "pieces", "plan", "reserved", "result",
    )  # fmt: skip

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.host = -1
        self.inputs: dict[int, Bytes] = {}
        self.in_arena: list[int] = []
        """Ranks whose contribution stands in the arena."""
        self.early: dict[ChunkKey, Bytes] = {}
        self.early_bytes = 0
        self.chunks: dict[tuple[int, int], Bytes] = {}
        """(part, span) -> bytes received from other machines."""
        self.made: dict[int, Bytes] = {}
        """Part -> where this machine's part stands (or is being folded)."""
        self.result: Bytes | None = None
        self.aliased = False
        """Whether the result is one of the contributions."""
        self.pieces: dict[int, Bytes] = {}
        """Result pieces folded for others by a machine that does not need the result."""
        self.done: set[ChunkKey] = set()
        """Chunks of this machine's own making that are ready, and result pieces that stand."""
        self.inline: dict[tuple[int, int], bytes] = {}
        """Bounds of what a rank reads -> those bytes, where they travel inline."""
        self.largest = 0
        """Bytes of the longest interval of the result that a local rank reads."""
        self.reserved = 0
        self.busy = 0
        self.closed = False

    # ---------------------------------------------------------------- opening
    def begin(self, plan: Plan, host: int) -> None:
        """The plan is known; the result's buffer must be set before anything is folded."""
        self.plan, self.host = plan, host
        self.dtype = dtype_of(plan.descriptor.dtype)
        self.folds = plan.descriptor.kind in FOLDING
        source = plan.descriptor.kind in (OpKind.BROADCAST, OpKind.SCATTER) and host == plan.root_host
        self.aliased = source or (self.folds and len(plan.hosts) == 1)

        reads = [self.interval(rank) for rank in plan.hosts[host].ranks]
        self.largest = max(stop - start for start, stop in reads)

    def interval(self, rank: int) -> tuple[int, int]:
        """Which bytes of the result a local rank reads; none where it gets no data."""
        plan = self.plan
        assert plan is not None
        interval = plan.interval(rank)
        return (0, 0) if interval is None else (interval.start, interval.stop)

    def retained_at_most(self) -> int:
        """Bytes of heap that the op may come to hold: received parts, and pieces folded for others."""
        plan = self.plan
        assert plan is not None
        retained = plan.arriving[self.host]
        if not plan.needs(self.host) and plan.mode == Mode.SHARD and plan.layout is None:
            retained += sum(span.stop - span.start for span in plan.spans if span.owner == self.host)
        return retained

    def settle(self) -> None:
        """Decide where this machine's parts and an aliased result stand, as soon as their ranks are here."""
        plan = self.plan
        assert plan is not None
        for part in plan.parts:
            if part.host != self.host or part.index in self.made:
                continue
            first = self.inputs.get(part.ranks[0])
            if first is None:
                if plan.part_nbytes[part.index] == 0:
                    self.made[part.index] = EMPTY
                continue
            if len(part.ranks) > 1 and not first.flags.writeable:
                first = np.empty(plan.part_nbytes[part.index], np.uint8)
            self.made[part.index] = first
        if self.aliased and self.result is None and 0 in self.made:
            first = self.made[0]
            # Folding needs a place to write; a result that is only handed on does not.
            writable = first.flags.writeable or not self.folds
            self.result = first if writable else np.empty(len(first), np.uint8)

    # -------------------------------------------------------------- arithmetic
    def make_part(self, part: int, span: int, leaves: bool) -> Digest | None:
        """Fold local ranks over one span into the machine's part; its digest where it leaves."""
        plan = self.plan
        assert plan is not None
        start, stop = plan.cuts[part][span].start, plan.cuts[part][span].stop
        out = self.made[part][start:stop]
        ranks = plan.parts[part].ranks
        if len(ranks) > 1 and self.folds:
            reduce = plan.descriptor.reduce
            # The average is taken once, of the sum over all machines.
            reduce = ReduceOp.SUM if reduce == ReduceOp.AVG else reduce
            inputs = [self.inputs.get(rank, EMPTY)[start:stop] for rank in ranks]
            fold_into(out, inputs, self.dtype, reduce)
        self.done.add((Role.PART, part, span))
        return digest_chunk(out) if leaves else None

    def fold(self, piece: int, leaves: bool) -> Digest | None:
        """Fold the sources of a piece into its place in the result; its digest where it leaves."""
        plan = self.plan
        assert plan is not None
        start, stop = plan.bounds(piece)
        if self.result is not None:
            out = self.result[start:stop]
        else:
            out = self.pieces[piece] = np.empty(stop - start, np.uint8)
        if self.folds:
            reduce = plan.descriptor.reduce
            divide_by = plan.size if reduce == ReduceOp.AVG else 0
            inputs = [self._source(part, span) for part, span in plan.sources(piece)]
            (fold_ring if plan.turns else fold_into)(out, inputs, self.dtype, reduce, divide_by)
        elif not self.aliased and stop > start:
            part, span = plan.sources(piece)[0]
            np.copyto(out, self._source(part, span))
            if (part, span) in self.chunks:
                self.chunks[part, span] = out  # the same bytes: the buffer they came in can go
        self.done.add((Role.RESULT, 0, piece))
        return digest_chunk(out) if leaves else None

    def _source(self, part: int, span: int) -> Bytes:
        found = self.part_chunk(part, span)
        if found is None:
            raise LookupError(f"part {part}, span {span} is not here")
        return found

    # ------------------------------------------------------------------ chunks
    def part_chunk(self, part: int, span: int) -> Bytes | None:
        """Bytes of a part chunk, made here or received; None where it is not here."""
        plan = self.plan
        assert plan is not None
        whole = self.made.get(part)
        if whole is None:
            return self.chunks.get((part, span))
        return whole[plan.cuts[part][span].start : plan.cuts[part][span].stop]

    def chunk(self, role: int, part: int, index: int) -> Bytes | None:
        """Bytes of any chunk that stands here complete; None where it does not."""
        if self.plan is None:
            return self.early.get((role, part, index))
        if not self.has(role, part, index):
            return None
        if role == Role.PART:
            return self.part_chunk(part, index)
        start, stop = self.plan.bounds(index)
        return self.pieces[index] if self.result is None else self.result[start:stop]

    def has(self, role: int, part: int, index: int) -> bool:
        """Whether a chunk stands here. A lone rank's part counts from its call: it says how far it is."""
        plan = self.plan
        if plan is None:
            return (role, part, index) in self.early
        if role == Role.RESULT:
            return (Role.RESULT, 0, index) in self.done
        if not (0 <= part < len(plan.parts) and 0 <= index < len(plan.cuts[part])):
            return False
        if part in self.made:
            lone = len(plan.parts[part].ranks) == 1
            return lone or (Role.PART, part, index) in self.done
        return (part, index) in self.chunks

    def place(self, role: int, part: int, index: int, data: Bytes) -> None:
        """Keep a verified chunk of another machine; duplicates change nothing.

        ``WireError`` where the plan has no such chunk, or one of another size.
        """
        plan = self.plan
        assert plan is not None
        if role == Role.PART:
            known = 0 <= part < len(plan.parts) and 0 <= index < len(plan.cuts[part])
            start, stop = (plan.cuts[part][index].start, plan.cuts[part][index].stop) if known else (0, -1)
        else:
            known = 0 <= index < plan.pieces
            start, stop = plan.bounds(index) if known else (0, -1)
        if stop - start != len(data):
            raise WireError(
                f"{Role(role).name.lower()} chunk {index} of part {part} has {len(data)} bytes; "
                f"{plan.descriptor.describe()} has {f'{stop - start} there' if known else 'no such chunk'}"
            )
        if role == Role.PART:
            if plan.parts[part].host != self.host:
                self.chunks.setdefault((part, index), data)
        elif (Role.RESULT, 0, index) not in self.done and not self.aliased and self.result is not None:
            np.copyto(self.result[start:stop], data)
            self.done.add((Role.RESULT, 0, index))

    def heap_bytes(self) -> int:
        """Bytes of received chunks and of pieces for others that are held now."""
        own = self.result
        received = (
            c.nbytes for c in list(self.chunks.values()) if own is None or not np.may_share_memory(c, own)
        )
        return self.early_bytes + sum(received) + sum(p.nbytes for p in list(self.pieces.values()))
