"""The vocabulary between the sans-IO core and whoever drives it.

The core is ``handle(event, now) -> effects`` plus ``deadline``: when it wants to be woken though nothing
happened. It has no sockets, clock, threads or payload bytes; a driver turns its world into events and
carries effects out. Three drivers exist: the peer's poll loop, the simulator, and text scripts in tests.

Events and effects on the hot path are plain slotted dataclasses: a frozen one costs about a microsecond
a field to build. Nobody changes one after it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from frogzmq.descriptor import Descriptor
from frogzmq.mailing import MailEffect, MailEvent
from frogzmq.plan.plan import Plan
from frogzmq.types import ConnId, Digest, GroupId, PeerId
from frogzmq.wire.messages import ChunkHeader, JoinGroup, Message


# --------------------------------------------------------------------- events
@dataclass(slots=True)
class Tick:
    """The deadline has passed."""


@dataclass(slots=True)
class LinkUp:
    """The transport connected to ``endpoint`` (again)."""

    endpoint: str


@dataclass(slots=True)
class LinkDown:
    """The transport lost ``endpoint``, or could not connect to it: ``reason`` in words."""

    endpoint: str
    reason: str


@dataclass(slots=True)
class LinkReceived:
    """A message came back on our own link to ``endpoint`` (Welcome, Refuse, Pong)."""

    endpoint: str
    message: Message


@dataclass(slots=True)
class Received:
    """A control message arrived from ``peer`` (the sender that the transport vouches for).

    ``route`` names the connection it came by, for ``Reply``.
    """

    peer: PeerId
    instance: str
    route: bytes
    message: Message


@dataclass(slots=True)
class ChunkReceived:
    """A chunk arrived, matched its digest, and its bytes are in the driver's hands."""

    peer: PeerId
    header: ChunkHeader


@dataclass(slots=True)
class ChunkRejected:
    """A chunk arrived whose bytes do not match its digest; the driver has dropped them."""

    peer: PeerId
    header: ChunkHeader


@dataclass(slots=True)
class RankJoined:
    """A local rank asks to take part in a group."""

    conn: ConnId
    join: JoinGroup


@dataclass(slots=True)
class RankPosted:
    """A local rank called op ``seq``; the first ``ready`` bytes of its contribution can be read."""

    gid: GroupId
    rank: int
    seq: int
    descriptor: Descriptor
    ready: int


@dataclass(slots=True)
class RankReady:
    """More of a local rank's contribution can be read: ``ready`` bytes from its start."""

    gid: GroupId
    rank: int
    seq: int
    ready: int


@dataclass(slots=True)
class RankConsumed:
    """A local rank has copied its result of op ``seq`` out."""

    gid: GroupId
    rank: int
    seq: int


@dataclass(slots=True)
class RankGot:
    """A local rank has copied its result of op ``seq`` out, and ``root`` stands for the bytes it has now.

    Takes the place of ``RankConsumed`` in groups that keep receipts.
    """

    gid: GroupId
    rank: int
    seq: int
    root: Digest


@dataclass(slots=True)
class RankLeft:
    """A local rank is gone from a group: it left (``clean``), failed or died; ``reason`` in words."""

    gid: GroupId
    rank: int
    clean: bool
    reason: str


@dataclass(slots=True)
class PartMade:
    """``MakePart`` is done; ``digest`` is None where the bytes stay on this machine."""

    gid: GroupId
    seq: int
    part: int
    span: int
    digest: Digest | None


@dataclass(slots=True)
class Folded:
    """``Fold`` is done: the piece stands in the result; ``digest`` is None where it stays here."""

    gid: GroupId
    seq: int
    piece: int
    digest: Digest | None


@dataclass(slots=True)
class Witnessed:
    """``Witness`` is done: the root of each interval that it named."""

    gid: GroupId
    seq: int
    roots: list[Digest]


# --------------------------------------------- notices between core machines
@dataclass(slots=True)
class PeerUp:
    """``peer`` can be sent to; ``epoch`` grows with every (re)connection."""

    peer: PeerId
    epoch: int


@dataclass(slots=True)
class PeerDown:
    """``peer`` is dead, replaced by a new instance, or cannot be reached: ``reason`` in words."""

    peer: PeerId
    reason: str


# -------------------------------------------------------------------- effects
@dataclass(slots=True)
class Dial:
    """Connect to ``endpoint`` (``tcp://ip:port``), encrypted to ``key`` (Z85) unless that is empty."""

    endpoint: str
    key: str = ""


@dataclass(slots=True)
class Hangup:
    """Close our link to ``endpoint``."""

    endpoint: str


@dataclass(slots=True)
class Attach:
    """From now on ``Send`` and ``SendChunk`` to ``peer`` use the link to ``endpoint``."""

    peer: PeerId
    endpoint: str
    pub_endpoint: str = ""


@dataclass(slots=True)
class SendLink:
    """Send on our link to ``endpoint``, whoever answers there."""

    endpoint: str
    message: Message


@dataclass(slots=True)
class Reply:
    """Send back on the connection that a ``Received`` came by."""

    route: bytes
    message: Message


@dataclass(slots=True)
class Send:
    """Send a control message to an attached peer."""

    peer: PeerId
    message: Message


@dataclass(slots=True)
class Publish:
    """Announce to everyone who listens; may be lost."""

    message: Message


@dataclass(slots=True)
class SendChunk:
    """Send the bytes that ``header`` names to an attached peer."""

    peer: PeerId
    header: ChunkHeader


@dataclass(slots=True)
class OpenOp:
    """An op begins here: make room according to ``plan``; ``host`` is this machine's place in it."""

    gid: GroupId
    seq: int
    plan: Plan
    host: int


@dataclass(slots=True)
class MakePart:
    """Fold the local ranks of ``part`` over ``span`` (if several) and, if it ``leaves``, hash it."""

    gid: GroupId
    seq: int
    part: int
    span: int
    leaves: bool


@dataclass(slots=True)
class Fold:
    """Fold the sources of ``piece`` into the result and, if it ``leaves``, hash it."""

    gid: GroupId
    seq: int
    piece: int
    leaves: bool


@dataclass(slots=True)
class FoldSolo:
    """An op of one machine whose contributions all came inline: fold it and hand every rank its result.

    Nothing is left of the op afterwards. One effect in place of OpenOp, Fold, a Deliver for each rank and
    CloseOp: small ops on one machine are paid by the call, not by the byte.
    """

    gid: GroupId
    seq: int
    plan: Plan


@dataclass(slots=True)
class Deliver:
    """Tell a local rank that the first ``upto`` bytes of its result can be read; ``final``: it is complete.

    ``upto`` is -1 where the rank gets no data (it is not the root, or it is the source).
    """

    gid: GroupId
    seq: int
    rank: int
    upto: int
    final: bool


@dataclass(slots=True)
class Witness:
    """Hash these intervals of the op's result as it stands now; the op is not closed meanwhile.

    ``urgent``: ranks wait for the outcome.
    """

    gid: GroupId
    seq: int
    intervals: tuple[tuple[int, int], ...]
    urgent: bool


@dataclass(slots=True)
class Verified:
    """Tell a local rank that all machines and ranks agree on op ``seq``."""

    gid: GroupId
    seq: int
    rank: int


@dataclass(slots=True)
class CloseOp:
    """Nobody needs the op's bytes any more."""

    gid: GroupId
    seq: int


@dataclass(slots=True)
class Joined:
    """The group is complete: tell the local rank."""

    gid: GroupId
    rank: int


@dataclass(slots=True)
class Note:
    """A line for the people who run a local rank: what is waited for, what fell back."""

    gid: GroupId
    rank: int
    text: str


@dataclass(slots=True)
class Fail:
    """Every op of ``gid`` from ``seq`` on fails on local ``rank`` with error ``code`` and ``text``.

    ``seq`` 0 before the group is complete: the join itself fails.
    """

    gid: GroupId
    rank: int
    seq: int
    code: str
    text: str


@dataclass(slots=True)
class CloseGroup:
    """No local rank is in the group any more; drop what is kept for it."""

    gid: GroupId


Event: TypeAlias = (
    Tick | LinkUp | LinkDown | LinkReceived | Received | ChunkReceived | ChunkRejected
    | RankJoined | RankPosted | RankReady | RankConsumed | RankGot | RankLeft | PartMade | Folded
    | Witnessed | PeerUp | PeerDown | MailEvent
)  # fmt: skip
Effect: TypeAlias = (
    Dial | Hangup | Attach | SendLink | Reply | Send | Publish | SendChunk | OpenOp | MakePart | Fold
    | FoldSolo | Deliver | Witness | Verified | CloseOp | Joined | Note | Fail | CloseGroup
    | PeerUp | PeerDown | MailEffect
)  # fmt: skip


class Machine(Protocol):
    """Anything that turns events into effects."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time ``now`` (seconds on any monotonic clock) and say what to do."""
        ...

    @property
    def deadline(self) -> float:
        """When to send the next ``Tick``; infinity while idle."""
        ...


@dataclass(slots=True)
class Stats:
    """Plain counters of one peer; only the border turns them into metrics."""

    chunks_sent: int = 0
    chunk_bytes_sent: int = 0
    chunks_received: int = 0
    chunk_bytes_received: int = 0
    duplicates: int = 0
    rejected_chunks: int = 0
    repairs_asked: int = 0
    repairs_answered: int = 0
    drops: int = 0
    ops_done: int = 0
    ops_failed: int = 0
    rejected_frames: int = 0
    strangers: int = 0
    rejected_by_peer: dict[str, int] = field(default_factory=dict)
