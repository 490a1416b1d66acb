"""What a peer knows of one other peer, and of one configured address; texts and rows about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from frogzmq.proto.links import RateMeter, RttEstimate
from frogzmq.types import PeerId
from frogzmq.wire.messages import Identity

MAX_ENDPOINTS = 32
MAX_PINGS = 16
"""Pings on one link whose answers are still awaited; older ones no longer count."""


class State(StrEnum):
    """Where things stand with another peer."""

    DIALLING = "dialling"
    """Trying its addresses; nothing was promised yet."""
    UP = "up"
    SLOW = "slow"
    """Attached, but silent for a while. Nothing fails for that."""
    LOST = "lost"
    """Its connection closed a moment ago and may come back."""
    DOWN = "down"
    """Told as dead or unreachable; perhaps dialled again now and then."""


REACHABLE = (State.UP, State.SLOW)
ATTACHED = (State.UP, State.SLOW, State.LOST)


@dataclass(slots=True)
class Challenger:
    """A newcomer that claims the identity of a living peer, while the living one is asked."""

    who: Identity
    route: bytes
    """Connection its Hello came by; empty where a job told of it."""
    deadline: float


@dataclass(slots=True)
class Contact:
    """One other peer. ``deadline`` is that of whatever is awaited in the present state."""

    who: Identity
    state: State = State.DOWN
    epoch: int = 0
    endpoint: str = ""
    """The link in use, or being tried; empty between rounds."""
    connected: bool = False
    deadline: float = math.inf
    greeting: bool = False
    """A Hello after a reconnection is unanswered: the next Welcome starts a new epoch."""
    queue: list[str] = field(default_factory=list)
    rounds: int = 0
    tried: dict[str, str] = field(default_factory=dict)
    """What happened at each address since ``since``."""
    seeds: dict[str, str] = field(default_factory=dict)
    """Configured addresses that led here, with their keys."""
    since: float = 0.0
    """When the present dialling or downtime began."""
    round_at: float = -math.inf
    reason: str = ""
    """Why it is lost or down."""
    resting: bool = True
    """Down and not to be dialled: it said Bye, or was never asked for."""
    heard_at: float = -math.inf
    called_at: float = -math.inf
    """When it last said something on a connection of its own."""
    ping_at: float = math.inf
    pings: dict[int, float] = field(default_factory=dict)
    challenger: Challenger | None = None
    armed: float = math.inf
    rtt: RttEstimate = field(default_factory=RttEstimate)
    received: RateMeter = field(default_factory=RateMeter)
    sent: RateMeter = field(default_factory=RateMeter)

    @property
    def peer(self) -> PeerId:
        """Its id."""
        return PeerId(self.who.peer)

    def candidates(self, me: Identity) -> list[tuple[str, str]]:
        """Addresses to dial, best first, with the key to encrypt to (empty: plain)."""
        if self.who.netns and self.who.netns == me.netns and self.who.local_endpoint:
            rows = [(self.who.local_endpoint, "")]
        else:
            rows = [(endpoint, self.who.key) for endpoint in self.who.endpoints]
        rows += self.seeds.items()
        return list(dict(rows).items())[:MAX_ENDPOINTS]

    def pub_endpoint(self, endpoint: str) -> str:
        """The announcement socket that goes with ``endpoint``; empty where it has none."""
        pubs = self.who.pub_endpoints
        if not pubs:
            return ""
        if endpoint == self.who.local_endpoint:
            return pubs[-1]
        if endpoint in self.who.endpoints:
            index = self.who.endpoints.index(endpoint)
            return pubs[index] if index < len(pubs) else ""
        # A configured address that the peer itself does not know of: same host, its announcement port.
        return endpoint.rpartition(":")[0] + ":" + pubs[0].rpartition(":")[2]

    def row(self, now: float) -> dict[str, object]:
        """What ``peek`` shows of it."""
        return {
            "peer": self.who.peer,
            "name": self.who.name,
            "instance": self.who.instance,
            "state": str(self.state),
            "epoch": self.epoch,
            "endpoint": self.endpoint,
            "rtt_s": self.rtt.smoothed if self.rtt.smoothed >= 0 else None,
            "rtt_min_s": self.rtt.least if self.rtt.smoothed >= 0 else None,
            "heard_s_ago": now - self.heard_at if self.heard_at > -math.inf else None,
            "reason": self.reason,
            "tried": dict(self.tried),
            "sent_bytes_per_s": self.sent.rate(now),
            "received_bytes_per_s": self.received.rate(now),
            "sent_peak_bytes_per_s": self.sent.peak,
            "received_peak_bytes_per_s": self.received.peak,
            "sent_bytes": self.sent.total,
            "received_bytes": self.received.total,
        }


@dataclass(slots=True)
class Seed:
    """A configured address whose owner is not known until it answers."""

    endpoint: str
    key: str
    peer: PeerId | None = None
    """Who answered; from then on its ``Contact`` does the dialling."""
    dialled: bool = False
    connected: bool = False
    deadline: float = math.inf
    failures: int = 0
    error: str = ""
    own: bool = False
    """The address leads back to this very peer: nothing to do."""
    armed: float = math.inf

    def row(self) -> dict[str, object]:
        """What ``peek`` shows of it."""
        state = "self" if self.own else "known" if self.peer else "dialling"
        return {
            "peer": self.peer or "",
            "name": "",
            "state": state,
            "endpoint": self.endpoint,
            "tried": {self.endpoint: self.error} if self.error else {},
        }


def called(who: Identity) -> str:
    """A peer for people: ``alice (0123456789abcdef)``."""
    return f"{who.name} ({who.peer})"


def unreachable_text(contact: Contact, me: Identity, now: float) -> str:
    """Every address tried, what happened there, and which way."""
    if not contact.tried:
        return (
            f"peer {called(contact.who)} has no address that this machine can dial; "
            "set `advertise` in its configuration"
        )
    tried = "; ".join(f"{endpoint}: {why}" for endpoint, why in contact.tried.items())
    back = (
        f"it called us {now - contact.called_at:.1f} s ago, so only the way from here to there is blocked"
        if contact.called_at > -math.inf
        else "nothing came from it to us either"
    )
    return (
        f"cannot reach peer {called(contact.who)} from {me.name} in {now - contact.since:.1f} s "
        f"({me.name} -> {contact.who.name}): {tried}. {back}"
    )


def duplicate_text(old: Identity, new: Identity) -> str:
    """Two living processes have one identity: which, and what to do."""
    return (
        f"two running peers have the identity {old.peer}: {old.name} (instance {old.instance}, "
        f"{', '.join(old.endpoints) or 'no address'}) and {new.name} (instance {new.instance}, "
        f"{', '.join(new.endpoints) or 'no address'}); stop one of them, or give it a key of its own "
        "(remove its keys/peer.key)"
    )


def superseded_text(current: Identity) -> str:
    """What a peer is told whose place was taken while it did not answer."""
    return (
        f"the identity {current.peer} was taken over by {current.name} (instance {current.instance}) "
        "while this peer did not answer"
    )
