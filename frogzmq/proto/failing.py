"""How a group fails: ranks that disagree, ranks and machines that are gone.

Every op from the first that cannot complete on fails, on every machine and with the same words; ops before
it complete. A rank that only gives (a broadcast's source) may have been told that it is done by then: its
call is over, so it hears of it at its next one, and the error names the op.
"""

from __future__ import annotations

from collections.abc import Sequence

from frogzmq.descriptor import Descriptor, decode_descriptor
from frogzmq.machine import CloseOp, Effect, Fail, Send
from frogzmq.proto.holding import PAST_ALL, Holding
from frogzmq.proto.op import Op
from frogzmq.types import PeerId
from frogzmq.wire.messages import GroupFailed, OpDescriptor, RankGone

LAST_CHANCE_S = 3.0
"""How long a machine that holds what a dead one made has to hand it on, before the op fails after all."""


class Failing(Holding):
    """Failure of a group, from this machine's ranks or another's."""

    def _disagree(self, op: Op, host: int, out: list[Effect]) -> None:
        """A machine's chunk belongs to another op than ours of this number: tell it what we called.

        It may think that it is done (a broadcast's source), and so may we. The op stays until it has failed,
        and no chunks of later ones are taken.
        """
        if op.descriptor is None or not op.posted:
            return
        self.disputed = min(self.disputed, op.seq)
        rank = next(iter(op.posted))
        text = op.descriptor.encoded.decode()
        peer = self.hosts[host].peer
        out.append(Send(peer, OpDescriptor(gid=self.hex, seq=op.seq, rank=rank, descriptor=text)))

    def asked(self, op: Op, peer: PeerId, items: Sequence[tuple[int, int, int]], out: list[Effect]) -> None:
        """A machine asks for chunks. If our plan owes it none of that kind, it has called another op.

        Where each waits for the other (two machines that gather to different roots), no chunk would ever
        tell them.
        """
        host, plan = self.host_of[peer], op.plan
        if plan is not None and any(not plan.due(host, role, part, index) for role, part, index in items):
            self._disagree(op, host, out)

    def described(self, message: OpDescriptor, now: float, out: list[Effect]) -> None:
        """Another machine says what one of its ranks called as this op."""
        theirs = decode_descriptor(message.descriptor.encode())
        op = self.ops.get(message.seq)
        if op is None or op.descriptor is None or op.descriptor == theirs or not op.posted:
            return
        rank = next(iter(op.posted))
        self.mismatch(message.seq, rank, op.descriptor, message.rank, theirs, now, out)

    def mismatch(
        self, seq: int, a: int, ours: Descriptor, b: int, theirs: Descriptor, now: float, out: list[Effect]
    ) -> None:
        """Two ranks called different operations as op ``seq``."""
        if b < a:
            a, ours, b, theirs = b, theirs, a, ours
        text = (
            f"ranks disagree on op {seq} of group {self.name!r}: rank {a} called {ours.describe()}, "
            f"rank {b} called {theirs.describe()}; all ranks must call the same operation with the same "
            "dtype and shape, in the same order"
        )
        self.fail(seq, "Mismatch", text, now, out)

    def fail(
        self, seq: int, code: str, text: str, now: float, out: list[Effect], *, tell: bool = True
    ) -> None:
        """Every op from ``seq`` on fails, here and (``tell``) on the other machines."""
        if self.limit is not None:
            if self.broken and self.limit[0] <= seq:
                return
            seq = min(seq, self.limit[0])  # what a clean leave has ended does not begin again
        self.limit, self.broken = (seq, code, text), True
        for rank, alive in self.local.items():
            if alive:
                out.append(Fail(self.gid, rank, seq, code, text))
        for op in [op for op in self.ops.values() if op.seq >= seq]:
            # A rank that was told of its complete result may not have read it yet: its bytes stay till then.
            if not (op.complete and op.unconsumed):
                del self.ops[op.seq]
                out.append(CloseOp(self.gid, op.seq))
        if tell:
            self.to_all(self.failure(), out)

    def failure(self) -> GroupFailed:
        """How a broken group failed, for another machine."""
        assert self.limit is not None
        seq, code, text = self.limit
        return GroupFailed(gid=self.hex, seq=seq, code=code, text=text)

    def last_handed_over(self, rank: int) -> int:
        """The last op up to which this machine holds everything that a local rank owes."""
        last = self.next_post.get(rank, 1) - 1
        for seq in sorted(self.ops):
            op = self.ops[seq]
            if seq <= last and op.plan is not None and not op.handed_over(rank):
                return seq - 1
        return last

    def rank_left(self, rank: int, clean: bool, reason: str, now: float, out: list[Effect]) -> None:
        """A local rank takes no further part; its peers on other machines are told."""
        if not self.local.get(rank):
            return
        self.local[rank] = False
        last = self.last_handed_over(rank)
        mail = self.mail_sent(rank)
        gone = RankGone(gid=self.hex, rank=rank, last_seq=last, clean=clean, reason=reason[:4000], mail=mail)
        self.to_all(gone, out)
        for op in self.ops.values():
            op.forget(rank)
        self.rank_gone(rank, last, clean, reason, now, out)
        if self.ledger is not None:
            self.ledger.ranks_left(now, out)
        self.close_ready(out)

    def mail_sent(self, rank: int) -> list[tuple[int, int]]:
        """How many messages a local rank has sent to each rank elsewhere (see ``proto.postal``)."""
        return []

    def rank_gone(
        self, rank: int, last: int, clean: bool, reason: str, now: float, out: list[Effect]
    ) -> None:
        """A rank, here or elsewhere, takes no part in ops after ``last``."""
        self.gone[rank] = last
        verb = "has left the group" if clean else "failed"
        text = f"{self.rank_text(rank)} {verb} after op {last}: {reason}"
        if not clean or any(seq > last and op.posted and not op.complete for seq, op in self.ops.items()):
            self.fail(last + 1, "RankLost", text, now, out, tell=False)
        elif self.limit is None or self.limit[0] > last + 1:
            self.limit = (last + 1, "RankLost", text)

    def peer_gone(self, host: int, reason: str, now: float, out: list[Effect]) -> None:
        """A machine is gone: what it still owes never comes; what it gave stays."""
        if self.done_there[host] < PAST_ALL:
            self.done_there[host] = PAST_ALL
            ranks = self.hosts[host].ranks
            text = f"{self.machine(host)} is gone: {reason}"
            owed = self._owed(host, text, now)
            left = [self.gone[rank] for rank in ranks if rank in self.gone]
            if owed or len(left) < len(ranks):
                first = owed or max(self.done, *self.next_post.values(), 1)
                self.fail(first, "RankLost", text, now, out)
            if self.ledger is not None:
                self.ledger.machine_left(host, reason, now, out)
            self.close_ready(out)

    def _owed(self, host: int, text: str, now: float) -> int:
        """The first op that lacks what only a dead machine had, or 0; earlier ones get a last chance."""
        for seq in sorted(self.ops):
            op = self.ops[seq]
            if op.complete or (op.plan is not None and host not in op.lacking()):
                continue
            if op.plan is None or not self.obtainable(op, host):
                return seq
            self.orphans[seq] = (now + LAST_CHANCE_S, host, text)
            op.repair_at = self.next_repair = now
        return 0

    def give_up(self, now: float, out: list[Effect]) -> None:
        """Fail ops that still lack what a dead machine made, though others announced that they hold it."""
        for seq, (at, host, text) in sorted(self.orphans.items()):
            op = self.ops.get(seq)
            if op is None or host not in op.lacking():
                del self.orphans[seq]
            elif now >= at:
                self.orphans.clear()
                self.fail(seq, "RankLost", text, now, out)
                return
