"""What a process group is on one machine: who is in it, its ops in flight and its watermarks.

The state that everything in ``proto.group`` works on, and words for people. It decides nothing.
"""

from __future__ import annotations

from collections import deque

from frogzmq.descriptor import Descriptor
from frogzmq.machine import Effect, Send
from frogzmq.plan.plan import make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.proto.op import Op
from frogzmq.proto.receipts import Ledger
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.view import View
from frogzmq.types import GroupId, PeerId
from frogzmq.wire.messages import GroupFailed, JoinGroup, Manifest, RankGone

MAX_VIEWS = 256
MAX_VIEW_PIECES = 1 << 16
"""Pieces of all remembered plans: uneven ones rarely repeat, and may have thousands."""
RECENT_OPS = 8
"""Closed ops whose order of observation is kept for ``peek``."""


class Members:
    """The members of a group seen from host ``here``, what they have called and how far each has come."""

    def __init__(self, join: JoinGroup, me: PeerId, settings: CoreSettings) -> None:
        self.gid = GroupId(bytes.fromhex(join.gid))
        self.hex, self.job, self.name, self.size = join.gid, join.job, join.name, join.size
        self.options = join.options
        self.me, self.settings = me, settings
        self.members = {member.rank: member for member in join.members}
        self.hosts = make_hosts({rank: PeerId(m.who.peer) for rank, m in self.members.items()})
        self.here = next(i for i, host in enumerate(self.hosts) if host.peer == me)
        self.host_of = {host.peer: i for i, host in enumerate(self.hosts)}
        self.local: dict[int, bool] = {}
        """Local ranks that joined; False once they are gone."""
        self.ops: dict[int, Op] = {}
        self.done = 1
        self.complete: set[int] = set()
        self.done_there = [1] * len(self.hosts)
        self.told = [1] * len(self.hosts)
        self.tell_at = float("inf")
        self.limit: tuple[int, str, str] | None = None
        """(first op that fails, error code, text); None while all is well."""
        self.broken = False
        self.disputed = 1 << 62
        """First op that another machine calls something else; it is about to fail."""
        self.gone: dict[int, int] = {}
        """Ranks that take no further part, with the last op that has their contribution."""
        self.next_post: dict[int, int] = {}
        self.views: dict[Descriptor, View] = {}
        self.view_pieces = 0
        self.next_repair = float("inf")
        self.orphans: dict[int, tuple[float, int, str]] = {}
        """Ops that lack what a dead machine made and others hold: until when, which machine, its text."""
        self.held_back: deque[tuple[Op, int]] = deque()
        """Ranks that only give, and have run ahead of who receives: told later that they are done."""
        self.recent: deque[tuple[int, Op]] = deque(maxlen=RECENT_OPS)
        self.ledger: Ledger | None = None
        """Where the group's options ask for receipts."""
        self.repairs_asked = self.duplicates = self.ops_done = 0

    def machine(self, host: int) -> str:
        """A machine and its ranks, for people."""
        ranks = self.hosts[host].ranks
        name = self.members[ranks[0]].who.name
        return f"machine {name} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"

    def rank_text(self, rank: int) -> str:
        """A rank, its process and its machine, for people."""
        member = self.members[rank]
        return f"rank {rank} (process {member.pid} on {member.host})"

    def view(self, descriptor: Descriptor) -> View:
        """The plan of an op as seen from here, remembered: training repeats a handful of descriptors.

        ``Mismatch`` where this group cannot run the op.
        """
        view = self.views.get(descriptor)
        if view is None:
            plan = make_plan(
                descriptor, self.hosts, self.options.mode, self.options.order,
                chunk_bytes=self.settings.chunk_bytes, small_bytes=self.settings.small_bytes,
            )  # fmt: skip
            if len(self.views) >= MAX_VIEWS or self.view_pieces >= MAX_VIEW_PIECES:
                self.views.clear()
                self.view_pieces = 0
            view = self.views[descriptor] = View(plan, self.here)
            self.view_pieces += plan.pieces
            if self.ledger is not None:
                view.solo = False  # nothing would be left to take a receipt of
        return view

    def to_all(self, message: GroupFailed | Manifest | RankGone, out: list[Effect]) -> None:
        """Send to every other machine."""
        for index, host in enumerate(self.hosts):
            if index != self.here:
                out.append(Send(host.peer, message))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do for the group on this machine."""
        return bool(self.local) and not any(self.local.values()) and not self.ops
