"""One process group on one machine, while it runs: what ranks call, and what arrives for it.

A group is *settled* when every machine has said that all its ranks have joined with the same member table
and options (``GroupReady``, repeated until everyone has heard everyone; see ``proto.joining``); only then
may ops run, so no chunk ever meets a machine that has not heard of its group. After that, ops are numbered
by each rank alike.

A group is built in storeys, each of which knows only those below it: ``members`` (the state), ``closing``
(how ops end), ``holding`` (who has what), ``failing`` (how the group ends), ``repair`` (asking again),
``postal`` (messages between single ranks), and on top what starts it all.
"""

from __future__ import annotations

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch
from frogzmq.machine import CloseGroup, CloseOp, Effect, Fail, Joined, Send
from frogzmq.proto.closing import LEAD
from frogzmq.proto.holding import PAST_ALL
from frogzmq.proto.op import Op
from frogzmq.proto.postal import Postal
from frogzmq.proto.receipts import Ledger
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.transfer import Transfer
from frogzmq.types import PeerId
from frogzmq.wire.messages import ChunkHeader, JoinGroup, OpDone

FAR_AHEAD = 4
"""A chunk may be this many windows ahead of this machine's watermark; further is a protocol error."""


class Group(Postal):
    """A settled or failing group on host ``here``."""

    def __init__(self, join: JoinGroup, me: PeerId, settings: CoreSettings, transfer: Transfer) -> None:
        super().__init__(join, me, settings, transfer)
        if join.options.witness:
            self.ledger = Ledger(self)

    def posted(
        self, rank: int, seq: int, descriptor: Descriptor, ready: int, now: float, out: list[Effect]
    ) -> None:
        """A local rank called op ``seq``."""
        self.next_post[rank] = seq + 1
        if self.limit is not None and seq >= self.limit[0]:
            out.append(Fail(self.gid, rank, self.limit[0], self.limit[1], self.limit[2]))
            known = self.ops.get(seq)
            if known is None or known.plan is None:
                self.ops.pop(seq, None)
                out.append(CloseOp(self.gid, seq))
            return
        op = self._op(seq, now)
        if op.descriptor is None:
            if seq > self.disputed:
                op.early.clear()
            try:
                view = self.view(descriptor)
            except Mismatch as error:
                text = f"op {seq} of group {self.name!r}, called by {self.rank_text(rank)}: {error}"
                self.fail(seq, "Mismatch", text, now, out)
                return
            op.open(descriptor, view, now, out)
        elif op.descriptor != descriptor:
            first = next(iter(op.posted))
            self.mismatch(seq, first, op.descriptor, rank, descriptor, now, out)
            return
        op.hold = len(self.ops) > LEAD * self.settings.window
        op.post(rank, ready, now, out)
        early_tags, op.early_tags = op.early_tags, {}
        for host, tag in early_tags.items():
            if tag != op.tag:
                self._disagree(op, host, out)
        self.settle(op, now, out)

    def _op(self, seq: int, now: float) -> Op:
        op = self.ops.get(seq)
        if op is None:
            op = self.ops[seq] = Op(self.gid, seq, self.here, now, self.settings.repair_after_s)
            op.witness = self.ledger is not None
            if len(self.hosts) > 1:
                self.next_repair = min(self.next_repair, op.repair_at)
        return op

    def accepts(self, peer: PeerId, header: ChunkHeader) -> bool:
        """Whether a chunk's bytes should be kept; False for duplicates and for what was never due."""
        host = self.host_of.get(peer)
        if host is None or host == self.here or header.seq < 1:
            return False
        if header.seq >= self.done + FAR_AHEAD * self.settings.window:
            return False
        if header.seq > self.disputed or (self.limit is not None and header.seq >= self.limit[0]):
            return False
        op = self.ops.get(header.seq)
        if op is None:
            return header.seq >= self.done and header.seq not in self.complete
        if op.plan is not None and header.descriptor != op.tag:
            return True  # not to be used, but to be heard of: see ``chunk``
        return op.wanted(header)

    def chunk(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> None:
        """A verified chunk that ``accepts`` said yes to."""
        host = self.host_of[peer]
        op = self.ops.get(header.seq)
        if op is not None and op.plan is not None and header.descriptor != op.tag:
            self._disagree(op, host, out)
            return
        self.other_done(host, header.done, out)
        if op is not None and op.seq not in self.ops:
            return  # that was the last thing it waited for
        op = self._op(header.seq, now)
        if op.plan is None:
            op.early_tags[host] = header.descriptor
        if op.plan is not None and not op.wanted(header):
            self.duplicates += 1
            return
        op.arrived(header, now, out)
        self.settle(op, now, out)

    def joined(self, out: list[Effect]) -> None:
        """Every machine is ready: ops may run."""
        for rank, alive in self.local.items():
            if alive:
                out.append(Joined(self.gid, rank))

    def close(self, out: list[Effect]) -> None:
        """Drop the group and what is left of its ops; tell the others that it needs nothing any more."""
        for index, host in enumerate(self.hosts):
            if index != self.here and self.done_there[index] < PAST_ALL:
                out.append(Send(host.peer, OpDone(gid=self.hex, upto=PAST_ALL)))
        out.extend(CloseOp(self.gid, seq) for seq in self.ops)
        self.ops.clear()
        self.mail.close(out)
        out.append(CloseGroup(self.gid))
