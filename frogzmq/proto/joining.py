"""How a group forms: every machine tells every other that its ranks are here, until all have heard all.

``GroupReady`` is repeated because the first may be sent before the other machine has heard of the group,
or before the link is up. A machine that is settled answers an unsettled one, so the last word is never lost.
"""

from __future__ import annotations

from blake3 import blake3

from frogzmq.machine import Effect, Fail, Note, Send
from frogzmq.proto.group import Group
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.settings import CoreSettings
from frogzmq.wire.messages import GroupReady, JoinGroup

RESEND_S = 1.0
NOTE_S = 5.0
"""While it waits, a rank is told every so often who is missing."""


def agreed(join: JoinGroup, settings: CoreSettings) -> str:
    """What must be equal on all machines, as text: the options, and the sizes that plans are cut by."""
    return f"{join.options.model_dump_json()} chunk={settings.chunk_bytes} small={settings.small_bytes}"


def members_digest(join: JoinGroup) -> str:
    """Digest of a member table: who is which rank, where."""
    hasher = blake3(derive_key_context="frogzmq 2026 v1 members")
    for member in sorted(join.members, key=lambda m: m.rank):
        hasher.update(f"{member.rank} {member.who.peer} {member.who.instance} {member.pid}\n".encode())
    return hasher.hexdigest()


class Joining:
    """The forming of one group, seen from one machine."""

    def __init__(self, group: Group, join: JoinGroup, peers: PeerTable, now: float) -> None:
        self.group, self.peers = group, peers
        self.members = members_digest(join)
        self.options = agreed(join, group.settings)
        self.started_at = now
        self.fail_at = now + join.timeout_s
        self.send_at = float("inf")
        self.note_at = now + NOTE_S
        self.heard: dict[int, bool] = {}
        """Hosts whose ranks have all joined; the value says whether that host is settled."""
        self.settled = False
        self.told: set[int] = set()
        """Hosts that were sent our word that we are settled."""

    @property
    def deadline(self) -> float:
        """When ``tick`` wants to run."""
        if self.group.broken:
            return float("inf")
        if self.settled:
            return self.send_at
        return min(self.send_at, self.note_at, self.fail_at)

    @property
    def over(self) -> bool:
        """Whether everyone has heard everyone."""
        others = len(self.group.hosts) - 1
        return self.settled and sum(self.heard.values()) == others == len(self.told)

    def add(self, rank: int, join: JoinGroup, now: float, out: list[Effect]) -> None:
        """A local rank joins."""
        if rank in self.group.local:
            text = f"rank {rank} of group {self.group.name!r} has joined already on this machine"
            out.append(Fail(self.group.gid, rank, 0, "DuplicateIdentity", text))
            return
        mine = agreed(join, self.group.settings)
        if members_digest(join) != self.members or mine != self.options:
            text = (
                f"rank {rank} joins group {self.group.name!r} with options {mine}, another rank of this "
                f"machine with {self.options}; all ranks must give the same mode, order and members"
            )
            self.group.local[rank] = True
            self.group.fail(0, "Mismatch", text, now, out)
            return
        self.group.local[rank] = True
        if len(self.group.local) == len(self.group.hosts[self.group.here].ranks):
            self.send_at = now
            self._settle(now, out)

    @property
    def all_here(self) -> bool:
        """Whether every local rank has joined."""
        return len(self.group.local) == len(self.group.hosts[self.group.here].ranks)

    def _message(self) -> GroupReady:
        group = self.group
        return GroupReady(
            gid=group.hex, ranks=list(group.hosts[group.here].ranks), members=self.members,
            options=self.options, settled=self.settled,
        )  # fmt: skip

    def ready(self, host: int, message: GroupReady, now: float, out: list[Effect]) -> None:
        """Another machine's ranks have all joined."""
        group = self.group
        if message.options != self.options or message.members != self.members:
            what = "options" if message.options != self.options else "members"
            text = (
                f"group {group.name!r}: {group.machine(host)} has {what} {message.options}, "
                f"{group.machine(group.here)} has {self.options}; give all ranks the same mode and order"
            )
            group.fail(0, "Mismatch", text, now, out)
            return
        news = self.heard.get(host) is not True
        self.heard[host] = message.settled or self.heard.get(host, False)
        if self.settled and not message.settled and news:
            out.append(Send(group.hosts[host].peer, self._message()))
        self._settle(now, out)

    def _settle(self, now: float, out: list[Effect]) -> None:
        group = self.group
        others = [host.peer for index, host in enumerate(group.hosts) if index != group.here]
        if self.settled or not self.all_here or len(self.heard) < len(others):
            return
        # A machine may reach this one a moment before it is reached: its first chunk would find no link.
        if not all(self.peers.is_up(peer) for peer in others):
            return
        self.settled = True
        self.send_at = now
        self.group.joined(out)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Repeat ourselves, say who is missing, give up in time."""
        group = self.group
        self._settle(now, out)
        if now >= self.send_at:
            for index, host in enumerate(group.hosts):
                done = self.heard.get(index, False) and index in self.told
                if index != group.here and not done and self.peers.is_up(host.peer):
                    out.append(Send(host.peer, self._message()))
                    if self.settled:
                        self.told.add(index)
            self.send_at = float("inf") if self.over else now + RESEND_S
        if self.settled:
            return
        if now >= self.fail_at:
            text = (
                f"group {group.name!r} was not complete after {now - self.started_at:.0f} s; "
                f"still missing: {self.missing()}"
            )
            group.fail(0, "DeadlineExceeded", text, now, out)
        elif now >= self.note_at:
            self.note_at = now + NOTE_S
            for rank in group.local:
                text = f"group {group.name!r} waits for {self.missing()}"
                out.append(Note(group.gid, rank, text))

    def missing(self) -> str:
        """Who has not joined, for people."""
        group = self.group
        names = [f"rank {r}" for r in group.hosts[group.here].ranks if r not in group.local]
        for index in range(len(group.hosts)):
            if index != group.here and index not in self.heard:
                reached = "" if self.peers.is_up(group.hosts[index].peer) else ", not reached yet"
                names.append(group.machine(index) + reached)
        return ", ".join(names) or "nobody"
