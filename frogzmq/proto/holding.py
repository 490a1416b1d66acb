"""Who holds which chunks of an op that is late here, as far as others have announced it.

Two things tell: ``Have``, which a machine publishes about an op that is late there, and its watermark, for
whoever is past an op has all of it. Both may be lost or come too late; then the machine that makes a chunk is
asked. What is kept is a set of machines per part of an open op, so it is bounded by the plan.
"""

from __future__ import annotations

from frogzmq.plan.plan import FOLDING, Plan
from frogzmq.proto.closing import Closing
from frogzmq.proto.op import Key, Op
from frogzmq.types import Role
from frogzmq.wire.messages import Have

PAST_ALL = 1 << 62
"""Watermark of a machine that needs nothing of the group any more, or is gone."""
RESULTS = -1
"""Stands for the folded pieces where holders are kept by part."""


def due(plan: Plan, key: Key) -> tuple[int, ...]:
    """Machines that come to hold a chunk by the plan; whoever pushes it to the others is first."""
    role, part, index = key
    if role == Role.PART:
        return (plan.parts[part].host, *plan.part_targets(part, index))
    folders = () if plan.descriptor.kind in FOLDING else plan.folders(index)
    return tuple(dict.fromkeys((plan.sender(index), *folders, *plan.receivers(index))))


class Holding(Closing):
    """What other machines hold."""

    def announced(self, host: int, message: Have) -> bool:
        """Another machine says what it holds of an op; whether that is news about an op that is late here."""
        op = self.ops.get(message.seq)
        if op is None or op.plan is None or op.complete:
            return False
        rows = [part for part in message.parts if part < len(op.plan.parts)]
        news = False
        for row in [*rows, RESULTS] if message.results else rows:
            hosts = op.holders.setdefault(row, set())
            news = news or host not in hosts
            hosts.add(host)
        return news and bool(op.asked)

    def has_all(self, host: int, op: Op) -> bool:
        """Whether a machine is past an op and can still be asked for it."""
        return op.seq < self.done_there[host] < PAST_ALL

    def others_with(self, op: Op, key: Key) -> list[int]:
        """Machines that are known to hold a chunk which they did not make."""
        assert op.plan is not None
        said = op.holders.get(key[1] if key[0] == Role.PART else RESULTS, set())
        return [
            host
            for host in due(op.plan, key)[1:]
            if host != self.here
            and self.done_there[host] < PAST_ALL
            and (host in said or self.has_all(host, op))
        ]

    def obtainable(self, op: Op, maker: int) -> bool:
        """Whether all that is still to come from ``maker`` is known to be held elsewhere, too."""
        return all(self.others_with(op, key) for key in op.lacking().get(maker, ()))
