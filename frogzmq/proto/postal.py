"""The storey of a group with messages between single ranks: what ends the group or a rank ends them too."""

from __future__ import annotations

from frogzmq.machine import Effect
from frogzmq.proto.holding import PAST_ALL
from frogzmq.proto.mail import Mail
from frogzmq.proto.repair import Repair
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.transfer import Transfer
from frogzmq.types import PeerId
from frogzmq.wire.messages import JoinGroup


class Postal(Repair):
    """A group with its messages (``mail``)."""

    def __init__(self, join: JoinGroup, me: PeerId, settings: CoreSettings, transfer: Transfer) -> None:
        super().__init__(join, me, settings)
        self.mail = Mail(self, transfer)

    def fail(
        self, seq: int, code: str, text: str, now: float, out: list[Effect], *, tell: bool = True
    ) -> None:
        """Every op from ``seq`` on fails, and every message, here and (``tell``) on the other machines."""
        super().fail(seq, code, text, now, out, tell=tell)
        if self.broken:
            self.mail.fail(out)

    def mail_sent(self, rank: int) -> list[tuple[int, int]]:
        """How many messages a local rank has sent to each rank elsewhere."""
        return self.mail.outbox.sent_by(rank)

    def rank_left(self, rank: int, clean: bool, reason: str, now: float, out: list[Effect]) -> None:
        """A local rank takes no further part; its peers on other machines are told."""
        alive = self.local.get(rank)
        super().rank_left(rank, clean, reason, now, out)
        if alive:
            self.mail.rank_left(rank, now, out)

    def rank_gone(
        self,
        rank: int,
        last: int,
        clean: bool,
        reason: str,
        now: float,
        out: list[Effect],
        mail: list[tuple[int, int]] | None = None,
    ) -> None:
        """A rank takes no part in ops after ``last``; ``mail``: how many messages each rank got from it."""
        super().rank_gone(rank, last, clean, reason, now, out)
        text = f"{self.rank_text(rank)} has left the group: {reason}"
        self.mail.rank_gone(rank, text, mail or [], out)

    def other_done(self, host: int, upto: int, out: list[Effect]) -> None:
        """Another machine has completed every op below ``upto``; all: it has dropped the group."""
        over = upto >= PAST_ALL > self.done_there[host]
        super().other_done(host, upto, out)
        if over:
            self.mail.host_gone(self.hosts[host].ranks, f"{self.machine(host)} has ended the group", out)

    def peer_gone(self, host: int, reason: str, now: float, out: list[Effect]) -> None:
        """A machine is gone: what it still owes never comes; what it gave stays."""
        super().peer_gone(host, reason, now, out)
        self.mail.host_gone(self.hosts[host].ranks, f"{self.machine(host)} is gone: {reason}", out)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do for the group on this machine."""
        return super().finished and not self.mail.owes

    @property
    def deadline(self) -> float:
        """When ``tick`` wants to run."""
        mail = self.mail  # asked before every wait: without the detour by ``super``
        return min(self.tell_at, self.next_repair, mail.outbox.deadline, mail.inbox.deadline)

    def tick(self, now: float, heard: dict[PeerId, float], out: list[Effect]) -> None:
        """Tell watermarks; ask again for what does not come."""
        super().tick(now, heard, out)
        self.mail.tick(now, out)
