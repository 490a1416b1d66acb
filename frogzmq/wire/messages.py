"""The catalogue of what peers say to each other, and of what a rank tells its peer when it joins.

Control messages are pydantic models, validated where bytes come in. Chunks have a fixed binary header
(``ChunkHeader``), because they are the hot path. Kind numbers are append only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from frogzmq.types import Digest, GroupId, Mode, Order, Role
from frogzmq.wire import limits

PROTOCOL = 1
"""Version of everything in this package; both sides of a connection must speak the same."""

Name = Annotated[str, Field(max_length=limits.NAME_CHARS)]
Text = Annotated[str, Field(max_length=limits.TEXT_CHARS)]
HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A peer id."""
HexGroup = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""A group id."""
HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MaybeDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""A digest, or empty."""
U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U63 = Annotated[int, Field(ge=0, lt=1 << 63)]
Rank = Annotated[int, Field(ge=0, lt=limits.RANKS)]
RoleNumber = Annotated[int, Field(ge=0, le=max(Role))]
Endpoint = Annotated[str, Field(max_length=limits.ENDPOINT_CHARS)]
Endpoints = Annotated[list[Endpoint], Field(max_length=limits.ENDPOINTS)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Control(_Model):
    """Base of all control messages; ``KIND`` is the byte on the wire."""

    KIND: ClassVar[int]


class Identity(_Model):
    """Who a peer is and how it is reached."""

    peer: HexId
    instance: Name
    """Fresh for each start of the process, so that a restart is told from a duplicate."""
    name: Name
    """For people: the machine's host name, or what its configuration says."""
    endpoints: Endpoints
    """``tcp://ip:port`` where other machines may dial it, best first; never a loopback address."""
    local_endpoint: Endpoint = ""
    """``tcp://127.0.0.1:port`` for peers in the same network namespace."""
    pub_endpoints: Endpoints = []
    """The announcement socket, in the order of ``endpoints``; the last one is the local one."""
    key: Name = ""
    """CURVE public key (Z85); empty: plain."""
    netns: Name = ""
    """Boot id and network namespace: equal on two peers that share a loopback interface."""
    python: Name = ""
    version: Name = ""


class Hello(Control):
    """First message on a link: who calls."""

    KIND = 1
    who: Identity


class Welcome(Control):
    """Answer to Hello on the same connection: who was reached."""

    KIND = 2
    who: Identity


class Refuse(Control):
    """Answer to Hello: why not. ``code`` names an error class of ``frogzmq.errors``."""

    KIND = 3
    code: Name
    text: Text


class Ping(Control):
    """Are you there? ``sent`` is the sender's own clock and only the sender reads it back."""

    KIND = 4
    nonce: U63
    sent: float


class Pong(Control):
    """Answer to Ping on the same connection."""

    KIND = 5
    nonce: U63
    sent: float


class Bye(Control):
    """This peer stops."""

    KIND = 6
    reason: Text


class GroupReady(Control):
    """All ranks that this peer hosts have joined ``gid``. ``settled``: it has heard so from everyone."""

    KIND = 7
    gid: HexGroup
    ranks: Annotated[list[Rank], Field(max_length=limits.MEMBERS)]
    members: HexDigest
    """Digest of the member table as this peer's ranks gave it."""
    options: Text
    """The group's options as text; must be equal on all."""
    settled: bool


class GroupFailed(Control):
    """The group cannot go on from op ``seq``; ``code`` names an error class."""

    KIND = 8
    gid: HexGroup
    seq: U63
    code: Name
    text: Text


class RankGone(Control):
    """A rank hosted by the sender takes no further part; ops up to ``last_seq`` have its contribution."""

    KIND = 9
    gid: HexGroup
    rank: Rank
    last_seq: Annotated[int, Field(ge=-1, lt=1 << 63)]
    clean: bool
    reason: Text
    mail: Annotated[list[tuple[Rank, U63]], Field(max_length=limits.MEMBERS)] = []
    """How many messages it has sent to each rank, where it has sent any."""


class OpDescriptor(Control):
    """What ``rank`` called as op ``seq``: sent when another machine's chunk disagrees."""

    KIND = 10
    gid: HexGroup
    seq: U63
    rank: Rank
    descriptor: Annotated[str, Field(max_length=limits.DESCRIPTOR_BYTES, pattern=r"^[ -~]*$")]


class Manifest(Control):
    """The chunk digests of a contribution, from the machine that made it."""

    KIND = 11
    gid: HexGroup
    seq: U63
    part: Rank
    root: HexDigest
    observed: Annotated[list[tuple[Rank, float]], Field(max_length=limits.MEMBERS)]
    """Ranks in it, with seconds between the op's first call on that machine and each rank's."""


class Want(Control):
    """Please (re)send these chunks: (role, part, index)."""

    KIND = 12
    gid: HexGroup
    seq: U63
    items: Annotated[list[tuple[RoleNumber, Rank, U32]], Field(max_length=limits.WANT_ITEMS)]


class Have(Control):
    """Announcement: parts of which the sender holds every chunk that it is due; the same for the result."""

    KIND = 13
    peer: HexId
    gid: HexGroup
    seq: U63
    parts: Annotated[list[Rank], Field(max_length=limits.MEMBERS)]
    results: bool = False


class OpDone(Control):
    """All ops below ``upto`` are complete on the sender's machine."""

    KIND = 14
    gid: HexGroup
    upto: U63
    ask: bool = False
    """The sender lacks the receiver's own watermark: please repeat it."""


class Credit(Control):
    """The sender has taken ``cost`` more units of chunks off the link (see ``proto.transfer``)."""

    KIND = 15
    cost: U63


class Links(Control):
    """Announcement: what the sender measured towards others: peer, RTT in s, bytes/s sent and received."""

    KIND = 16
    peer: HexId
    rows: Annotated[list[tuple[HexId, float, float, float]], Field(max_length=limits.LINK_ROWS)]


class OpReceipt(Control):
    """What the sender's machine says of op ``seq``: see ``content.audit.Testimony``. All are roots."""

    KIND = 17
    gid: HexGroup
    seq: U63
    op: HexDigest
    """Digest of the op number and its descriptor."""
    given: Annotated[list[tuple[Rank, HexDigest]], Field(max_length=limits.RECEIPT_ROWS)]
    """Parts that the machine gave."""
    held: MaybeDigest
    """Digest over the roots of all parts as it observed them; empty: it did not see all of them."""
    result: MaybeDigest
    odd: Annotated[list[tuple[Rank, HexDigest]], Field(max_length=limits.RECEIPT_ROWS)]
    """Its ranks that got other bytes than the machine had for them."""
    ask: bool = False
    """The sender lacks the receiver's own: please repeat it."""


class MailOffer(Control):
    """Message ``n`` from rank ``src`` (of the sender) to rank ``dst``: its bytes come when asked for."""

    KIND = 20
    gid: HexGroup
    src: Rank
    dst: Rank
    n: U63
    """Messages are numbered from 1 for each pair of ranks."""
    tag: U32
    size: U63
    dtype: Name


class MailWant(Control):
    """A receive matches message ``n``: send its chunks, and these ones again."""

    KIND = 21
    gid: HexGroup
    src: Rank
    dst: Rank
    n: U63
    chunks: Annotated[list[U32], Field(max_length=limits.WANT_ITEMS)]


class MailSeen(Control):
    """The sender knows of every message up to ``known``; those in ``numbers`` need not be kept for it."""

    KIND = 22
    gid: HexGroup
    src: Rank
    dst: Rank
    known: U63
    numbers: Annotated[list[U63], Field(max_length=limits.MAIL_ITEMS)]
    answers: U63
    """``upto`` of the MailAsk that this answers; 0: none."""


class MailAsk(Control):
    """``upto`` messages were sent: how many are known there, and which of ``numbers`` are not needed?"""

    KIND = 23
    gid: HexGroup
    src: Rank
    dst: Rank
    upto: U63
    numbers: Annotated[list[U63], Field(max_length=limits.MAIL_ITEMS)]


class MailLost(Control):
    """Answer to MailWant: the message's bytes never come, because ..."""

    KIND = 24
    gid: HexGroup
    src: Rank
    dst: Rank
    n: U63
    text: Text


class ChunkHeader(NamedTuple):
    """What a chunk is, with the digest its bytes must match. Fixed binary form: see ``wire.frames``."""

    gid: GroupId
    seq: int
    """Op number; for ``Role.MAIL`` 2**62 + 2**40 * receiving rank + message number."""
    role: Role
    part: int
    """Contribution index for ``Role.PART``; 0 for results; sending rank for ``Role.MAIL``."""
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    """Span index for ``Role.PART``, piece index for ``Role.RESULT``, place in its message for MAIL."""
    size: int
    digest: Digest
    descriptor: bytes
    """First 8 bytes of the descriptor's digest: ops that differ are noticed at the first chunk. For
    ``Role.MAIL`` the tag (u32) and the mark of the dtype (first 4 bytes of its name's BLAKE3)."""
    done: int
    """Every op of the group below this number is complete on the sender's machine."""


Message: TypeAlias = (
    Hello | Welcome | Refuse | Ping | Pong | Bye | GroupReady | GroupFailed | RankGone | OpDescriptor
    | Manifest | Want | Have | OpDone | Credit | Links | OpReceipt
    | MailOffer | MailWant | MailSeen | MailAsk | MailLost
)  # fmt: skip
CONTROL: tuple[type[Control], ...] = (
    Hello, Welcome, Refuse, Ping, Pong, Bye, GroupReady, GroupFailed, RankGone, OpDescriptor,
    Manifest, Want, Have, OpDone, Credit, Links, OpReceipt, MailOffer, MailWant, MailSeen, MailAsk, MailLost,
)  # fmt: skip
CHUNK_KIND = 32


class Member(_Model):
    """One rank of a group: where it lives and how its machine's peer is reached."""

    rank: Rank
    pid: U32
    host: Name
    who: Identity


class GroupOptions(_Model):
    """What all ranks of a group must agree on."""

    mode: Mode = Field(default=Mode.AUTO, strict=False)
    order: Order = Field(default=Order.MACHINE, strict=False)
    receipts: bool = False
    """Keep a receipt of every op."""
    verify: bool = False
    """Compare the receipts of every op before a rank may go on with its result."""

    @property
    def witness(self) -> bool:
        """Whether results are hashed on the machine that has them and in the ranks that get them."""
        return self.receipts or self.verify


class JoinGroup(_Model):
    """A rank's request to its own peer: take part in a group."""

    gid: HexGroup
    job: Name
    name: Name
    rank: Rank
    size: Annotated[int, Field(ge=1, lt=limits.RANKS)]
    timeout_s: float
    options: GroupOptions
    members: Annotated[list[Member], Field(max_length=limits.MEMBERS)]
