"""The receipts of one group on one machine: taken as ops complete, set beside those of other machines.

::

    op complete here ---Witness---> driver hashes the result ---Witnessed---+
    rank has copied its result out and hashed it ---RankGot-----------------+--> our testimony: kept, and sent
    another machine's testimony (OpReceipt) --------------------------------+--> all are here: judged

With ``verify`` an op's ranks go on only after the judgement (``Verified``), or the group fails with
``IntegrityError`` from that op on, everywhere with the same words. Without, nobody waits: a divergence is
noted to the ranks, and stands in the log.

The op's bytes stay until our testimony is given (``Op.watched``); a receipt is taken off the critical path,
of what stands in memory *then*, so it also covers what happened to the bytes after they were folded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from frogzmq.content.audit import Case, Testimony, describe, digest_parts, judge
from frogzmq.content.manifest import root_of
from frogzmq.machine import Effect, Note, Send, Verified, Witness
from frogzmq.plan.plan import Plan
from frogzmq.proto.op import Op
from frogzmq.types import Digest, OpKind
from frogzmq.wire.limits import RECEIPT_ROWS
from frogzmq.wire.messages import OpReceipt

if TYPE_CHECKING:
    from frogzmq.proto.failing import Failing

KEPT = 1024
"""Ops of a group whose receipts are kept."""
KEPT_DIGESTS = 1 << 15
"""Digests in them, all together: what bounds the log of a group of thousands."""
SHARED = (OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER)
"""Kinds whose result is the same on all machines."""


class Record:
    """What is known of one op. ``plan`` is None until a local rank has called it."""

    __slots__ = ("got", "heard", "machines", "parts", "plan", "result", "seq", "state", "text", "weight")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.plan: Plan | None = None
        self.parts: dict[int, Digest] = {}
        """Roots of parts, as this machine observed them or as the machine that gave them says."""
        self.result: Digest | None = None
        self.got: dict[int, Digest] = {}
        """Local ranks, with the root of what they got."""
        self.heard: dict[int, Testimony] = {}
        self.weight = 0
        """Digests held, when last counted."""
        self.state = "open"
        """``open``, ``kept`` (our testimony is given), ``agreed`` or ``differs``."""
        self.text = ""

    def digests(self) -> int:
        """How many digests are held, about."""
        said = sum(3 + len(each.given) + len(each.odd) for each in self.heard.values())
        return 2 + len(self.parts) + len(self.got) + said


class Watch:
    """A complete op whose testimony, or verdict, is due."""

    __slots__ = ("intervals", "op", "roots", "waits")

    def __init__(self, op: Op, intervals: dict[int, tuple[int, int]], waits: set[int]) -> None:
        self.op = op
        self.intervals = intervals
        """Where in the machine's result each of its reading ranks finds its own."""
        self.waits = waits
        """Local ranks that have not said what they got."""
        self.roots: dict[tuple[int, int], Digest] | None = None


class Ledger:
    """Receipts of ``group``. It has none where the options do not ask for them."""

    def __init__(self, group: Failing) -> None:
        self.group = group
        self.verify = group.options.verify
        self.records: OrderedDict[int, Record] = OrderedDict()
        self.watches: dict[int, Watch] = {}
        self.noted = False
        self._digests = 0
        self._completing = 0
        """The op whose completion is being handled: its group closes it afterwards, not we."""

    # ------------------------------------------------------------------- our own
    def completed(self, op: Op, now: float, out: list[Effect]) -> None:
        """An op is complete on this machine: have its result hashed."""
        plan, view, group = op.plan, op.view, self.group
        assert plan is not None
        assert view is not None
        record = self._record(op.seq)
        if record is None:
            return
        record.plan = plan
        if plan.descriptor.kind == OpKind.BARRIER:
            record.state = "agreed"
            self._bound(record)
            return
        op.watched = True
        readers = [rank for rank in sorted(view.reads) if group.local.get(rank)]
        intervals = {rank: (view.reads[rank].start, view.reads[rank].stop) for rank in readers}
        if not intervals and plan.descriptor.kind in SHARED:
            intervals[-1] = (0, plan.result_nbytes(group.here))  # the source of a broadcast
        waits = {rank for rank in readers if rank not in record.got}
        watch = self.watches[op.seq] = Watch(op, intervals, waits)
        if intervals:
            wanted = tuple(sorted(set(intervals.values())))
            out.append(Witness(op.gid, op.seq, wanted, self.verify))
        else:
            watch.roots = {}

        self._completing = op.seq
        self._look(op.seq, now, out)
        self._completing = 0

    def got(self, rank: int, seq: int, root: Digest, now: float, out: list[Effect]) -> None:
        """A local rank says what it got."""
        record = self._record(seq)
        if record is not None:
            record.got[rank] = root
        if seq in self.watches:
            self.watches[seq].waits.discard(rank)
            self._look(seq, now, out)

    def witnessed(self, seq: int, roots: list[Digest], now: float, out: list[Effect]) -> None:
        """The intervals of an op's result are hashed."""
        watch = self.watches.get(seq)
        if watch is not None:
            watch.roots = dict(zip(sorted(set(watch.intervals.values())), roots, strict=True))
            self._look(seq, now, out)

    def ranks_left(self, now: float, out: list[Effect]) -> None:
        """Local ranks are gone: nothing is to be heard from them any more."""
        for seq in list(self.watches):
            self._look(seq, now, out)

    def machine_left(self, host: int, reason: str, now: float, out: list[Effect]) -> None:
        """Another machine is gone: what it has not said of an op that waits for it cannot be verified."""
        owed = [seq for seq in sorted(self.watches) if host in self.awaited(seq)]
        if owed:
            text = f"{self.group.machine(host)} is gone before its receipt of op {owed[0]} came: {reason}"
            self.group.fail(owed[0], "RankLost", text, now, out)

    def _look(self, seq: int, now: float, out: list[Effect]) -> None:
        """Give our testimony, if everything for it is here."""
        watch = self.watches[seq]
        if seq not in self.group.ops:
            del self.watches[seq]  # it failed
            return
        watch.waits = {rank for rank in watch.waits if self.group.local.get(rank)}
        if watch.roots is not None and not watch.waits:
            self._testify(watch, now, out)

    def _testify(self, watch: Watch, now: float, out: list[Effect]) -> None:
        op, here = watch.op, self.group.here
        record = self.records.get(op.seq)
        assert op.plan is not None
        assert watch.roots is not None
        if record is not None and here not in record.heard:
            roots = part_roots(op)
            record.parts |= roots
            shared = op.plan.descriptor.kind in SHARED
            record.result = watch.roots.get((0, op.plan.result_nbytes(here)))
            odd = [
                (rank, record.got[rank])
                for rank, interval in sorted(watch.intervals.items())
                if rank in record.got and record.got[rank] != watch.roots[interval]
            ]
            mine = [part.index for part in op.plan.parts if part.host == here and part.index in roots]
            whole = len(roots) == len(op.plan.parts)
            record.heard[here] = Testimony(
                op.plan.descriptor.digest(op.seq),
                tuple((part, roots[part]) for part in mine[:RECEIPT_ROWS]),
                digest_parts(roots[part] for part in sorted(roots)) if whole else None,
                record.result if shared else None,
                tuple(odd[:RECEIPT_ROWS]),
            )
            record.state = "kept"
            self._bound(record)
            for host in self._others():
                self._tell(host, op.seq, record.heard[here], False, out)
        if not self.verify or not any(self.group.local.values()):
            self._release(op.seq, now, out)
        if record is not None:
            self._judge(record, now, out)

    def _release(self, seq: int, now: float, out: list[Effect]) -> None:
        watch = self.watches.pop(seq, None)
        if watch is not None:
            watch.op.watched = False
            if seq != self._completing:
                self.group.settle(watch.op, now, out)

    # -------------------------------------------------------------------- others'
    def heard(self, host: int, message: OpReceipt, now: float, out: list[Effect]) -> None:
        """Another machine's testimony."""
        record = self._record(message.seq)
        if record is None:
            return
        if message.ask:
            self.answer(host, message.seq, out)
        if host in record.heard:
            return
        said = record.heard[host] = testimony(message)
        for part, root in said.given:
            record.parts.setdefault(part, root)
        self._bound(record)
        self._judge(record, now, out)

    def _judge(self, record: Record, now: float, out: list[Effect]) -> None:
        """When every machine has spoken: agreed, or not."""
        plan, group = record.plan, self.group
        if plan is None or record.state != "kept" or len(record.heard) < len(group.hosts):
            return
        world = group.size
        readers = frozenset(r for r in range(world) if plan.descriptor.gets(r, world) >= 0)
        source = plan.root_host if plan.descriptor.kind == OpKind.BROADCAST else -1
        case = Case(tuple(host.ranks for host in group.hosts), readers, len(plan.parts), source)
        found = judge(case, record.heard)
        if found is None:
            record.state = "agreed"
            self._agreed(record.seq, now, out)
            return
        words = describe(found, [group.machine(host) for host in range(len(group.hosts))])
        record.state = "differs"
        record.text = f"op {record.seq} {plan.descriptor.describe()} of group {group.name!r}: {words}"
        if self.verify:
            group.fail(record.seq, "IntegrityError", record.text, now, out)
        elif not self.noted:
            self.noted = True
            text = f"receipts differ: {record.text}"[:4000]
            out.extend(Note(group.gid, rank, text) for rank in self._living())

    def _agreed(self, seq: int, now: float, out: list[Effect]) -> None:
        if not self.verify or seq not in self.watches:
            return
        out.extend(Verified(self.group.gid, seq, rank) for rank in self._living())
        self._release(seq, now, out)

    def answer(self, host: int, seq: int, out: list[Effect]) -> None:
        """Repeat our testimony to a machine that lacks it."""
        record = self.records.get(seq)
        mine = record.heard.get(self.group.here) if record is not None else None
        if mine is not None:
            self._tell(host, seq, mine, False, out)

    def ask(self, seq: int, out: list[Effect]) -> None:
        """Somebody's testimony of a complete op has not come: repeat ours, and ask."""
        record = self.records.get(seq)
        mine = record.heard.get(self.group.here) if record is not None else None
        if record is None or mine is None:
            return
        for host in self._others():
            if host not in record.heard:
                self._tell(host, seq, mine, True, out)

    def awaited(self, seq: int) -> list[int]:
        """Machines whose testimony a complete op still waits for."""
        record = self.records.get(seq)
        if record is None or not self.verify or seq not in self.watches:
            return []
        return [host for host in range(len(self.group.hosts)) if host not in record.heard]

    # ------------------------------------------------------------------- helpers
    def _others(self) -> Iterator[int]:
        return (host for host in range(len(self.group.hosts)) if host != self.group.here)

    def _living(self) -> list[int]:
        return [rank for rank, alive in self.group.local.items() if alive]

    def _tell(self, host: int, seq: int, said: Testimony, ask: bool, out: list[Effect]) -> None:
        message = OpReceipt(
            gid=self.group.hex, seq=seq, op=said.descriptor.hex(),
            given=[(part, root.hex()) for part, root in said.given],
            held=(said.held or b"").hex(), result=(said.result or b"").hex(),
            odd=[(rank, root.hex()) for rank, root in said.odd], ask=ask,
        )  # fmt: skip
        out.append(Send(self.group.hosts[host].peer, message))

    def _record(self, seq: int) -> Record | None:
        """The op's record, begun if need be; None where it is too old to be kept, or absurdly far ahead."""
        record = self.records.get(seq)
        if record is None:
            if not self.group.done - KEPT <= seq < self.group.done + KEPT:
                return None
            record = self.records[seq] = Record(seq)
        return record

    def _bound(self, record: Record) -> None:
        """Drop the oldest receipts beyond the bounds; never one that is still in use."""
        self._digests -= record.weight
        record.weight = record.digests()
        self._digests += record.weight
        while len(self.records) > KEPT or (self._digests > KEPT_DIGESTS and len(self.records) > 64):
            seq, oldest = next(iter(self.records.items()))
            if seq in self.watches or seq in self.group.ops:
                return
            self._digests -= oldest.weight
            del self.records[seq]


def part_roots(op: Op) -> dict[int, Digest]:
    """Roots of the parts of which this machine has seen every byte."""
    plan, found = op.plan, {}
    assert plan is not None
    for part in plan.parts:
        digests = [op.have.get((part.index, span)) for span in range(len(plan.cuts[part.index]))]
        kept = [digest for digest in digests if digest is not None]
        if len(kept) == len(digests):
            found[part.index] = root_of(kept)
    return found


def testimony(message: OpReceipt) -> Testimony:
    """What another machine says, as values."""
    return Testimony(
        Digest(bytes.fromhex(message.op)),
        tuple((part, Digest(bytes.fromhex(root))) for part, root in message.given),
        Digest(bytes.fromhex(message.held)) if message.held else None,
        Digest(bytes.fromhex(message.result)) if message.result else None,
        tuple((rank, Digest(bytes.fromhex(root))) for rank, root in message.odd),
    )
