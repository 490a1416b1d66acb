"""How ops of a group end well: completed here, told to the others, closed when nobody needs them.

``done`` is this machine's watermark: every op below it is complete here. It rides on every chunk, and in
``OpDone`` when nothing else is sent; an op is closed (its bytes dropped) when all machines are past it.
"""

from __future__ import annotations

from frogzmq.content.manifest import root_of
from frogzmq.machine import CloseOp, Effect
from frogzmq.plan.plan import Plan
from frogzmq.proto.members import Members
from frogzmq.proto.op import Op
from frogzmq.wire.messages import Manifest

EAGER_DONE_BYTES = 1 << 20
"""Completion of ops at least this large is told at once, so that their memory is free early."""
DONE_DELAY_S = 0.02
"""Completion of smaller ops usually rides on the next chunk; after this long it is told anyway."""
LEAD = 2
"""Windows of ops that may be open at once; ranks that need nothing back are held from opening more."""


class Closing(Members):
    """Completion and closing of the ops of a group."""

    def settle(self, op: Op, now: float, out: list[Effect]) -> None:
        """After anything happened to an op: note completion, close it if nobody needs it."""
        if op.held:
            self.held_back.extend((op, rank) for rank in op.held)
            op.held.clear()
        if op.complete and op.seq >= self.done and op.seq not in self.complete:
            self._completed(op, now, out)
        if op.complete:
            self._close(op, out)

    def _completed(self, op: Op, now: float, out: list[Effect]) -> None:
        self.ops_done += 1
        self.complete.add(op.seq)
        while self.done in self.complete:
            self.complete.discard(self.done)
            self.done += 1
        if len(self.hosts) > 1:
            self.next_repair = min(self.next_repair, now + self.settings.repair_after_s)
            plan = op.plan
            assert plan is not None
            self._manifests(op, plan, out)
            eager = plan.result_nbytes(self.here) >= EAGER_DONE_BYTES
            self.tell_at = min(self.tell_at, now if eager else now + DONE_DELAY_S)
        if self.ledger is not None:
            self.ledger.completed(op, now, out)

    def _manifests(self, op: Op, plan: Plan, out: list[Effect]) -> None:
        for part in op.view.local if op.view else ():
            spans = len(plan.cuts[part.index])
            if spans == 1:
                continue  # the chunk's digest has said it
            digests = [op.have.get((part.index, span)) for span in range(spans)]
            if any(digest is None for digest in digests):
                continue  # some of it never left this machine
            root = root_of([digest for digest in digests if digest is not None]).hex()
            times = [(r, at) for ranks, host, at in op.observed if host == self.here for r in ranks]
            message = Manifest(gid=self.hex, seq=op.seq, part=part.index, root=root, observed=times)
            self.to_all(message, out)

    def _close(self, op: Op, out: list[Effect]) -> None:
        if op.unconsumed:
            return
        over = self.broken and self.limit is not None and op.seq >= self.limit[0]
        if not over and (op.watched or self._needed(op)):
            return
        del self.ops[op.seq]
        self._let_go(out)
        self.recent.append((op.seq, op))
        if op.view is None or not op.view.solo:
            out.append(CloseOp(self.gid, op.seq))

    def _needed(self, op: Op) -> bool:
        """Whether a local rank or another machine has not come to the end of a complete op."""
        if op.seq >= self.disputed or any(
            alive and rank not in op.final for rank, alive in self.local.items()
        ):
            return True
        others = self.done_there[: self.here] + self.done_there[self.here + 1 :]
        return min(others, default=op.seq + 1) <= op.seq

    def _let_go(self, out: list[Effect]) -> None:
        """Ranks that only give may go on as far as everybody else has followed."""
        while self.held_back and len(self.ops) <= LEAD * self.settings.window:
            op, rank = self.held_back.popleft()
            if op.seq in self.ops:
                op.finish(rank, out)
                if op.complete:
                    self._close(op, out)

    def close_ready(self, out: list[Effect]) -> None:
        """Close what can be closed: another machine went on, or a rank is gone.

        That is complete ops, and any op that nobody here or elsewhere waits for any more.
        """
        abandoned = bool(self.local) and not any(self.local.values())
        for op in list(self.ops.values()):
            if op.complete or abandoned:
                self._close(op, out)

    def other_done(self, host: int, upto: int, out: list[Effect]) -> None:
        """Another machine has completed every op below ``upto``."""
        if upto > self.done_there[host]:
            self.done_there[host] = upto
            self.close_ready(out)
