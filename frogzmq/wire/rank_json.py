"""The datagrams between a rank and its peer that are JSON: rare ones, with texts or tables in them.

``KIND`` is the datagram's first byte; ranks use 1 to 63, the peer 64 and up. Numbers are append only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from frogzmq.errors import VersionMismatch
from frogzmq.wire import limits
from frogzmq.wire.messages import PROTOCOL, U32, U63, Identity, JoinGroup, Name, Text

LongText = Annotated[str, Field(max_length=limits.EXPLAIN_CHARS)]
Path = Annotated[str, Field(max_length=limits.PATH_CHARS)]


class RankJson(BaseModel):
    """Base of all JSON datagrams."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    KIND: ClassVar[int]


class _Versioned(RankJson):
    # Fields of other versions are let through, so that the version is what is complained about.
    model_config = ConfigDict(extra="ignore")

    protocol: U32
    """``messages.PROTOCOL`` of the sender; another one raises ``VersionMismatch``."""

    @field_validator("protocol")
    @classmethod
    def _same(cls, theirs: int) -> int:
        if theirs != PROTOCOL:
            who = "this machine's peer" if cls.KIND == Welcome.KIND else "the rank or command"
            raise VersionMismatch(PROTOCOL, theirs, who)
        return theirs


class Hello(_Versioned):
    """First datagram of a rank (or of a command line tool, which leaves ``torch`` empty)."""

    KIND = 1
    pid: U32
    version: Name
    """frogzmq's release."""
    torch: Name
    python: Name


class Join(JoinGroup):
    """Take part in a group; ``handle`` names it on this connection from now on."""

    KIND: ClassVar[int] = 2
    handle: U32

    def group(self) -> JoinGroup:
        """Return the request without the handle."""
        return JoinGroup.model_construct(**{name: getattr(self, name) for name in JoinGroup.model_fields})


class Leave(RankJson):
    """The rank leaves a group; ``clean`` where the program destroyed the group by itself."""

    KIND = 7
    handle: U32
    clean: bool
    reason: Text


class Bye(RankJson):
    """The rank closes the connection on purpose."""

    KIND = 9
    clean: bool
    reason: Text


class Peek(RankJson):
    """Ask for a snapshot of the peer, or (``receipts``) for the receipts that it keeps.

    ``gid`` empty: of all groups; else of this one.
    """

    KIND = 10
    receipts: bool = False
    gid: Name = ""


class Stop(RankJson):
    """Ask the peer to stop."""

    KIND = 11


class Welcome(_Versioned):
    """Answer to Hello: who the peer is and which files its arena has."""

    KIND = 64
    who: Identity
    pid: U32
    arena: Annotated[list[Path], Field(max_length=limits.SEGMENTS)]
    ephemeral: bool
    """The peer was started by a rank and ends with the last one."""


class Joined(RankJson):
    """The group is complete."""

    KIND = 65
    handle: U32


class Failed(RankJson):
    """Every op of the group from ``seq`` on fails; ``code`` names an error class. ``seq`` 0: the join."""

    KIND = 68
    handle: U32
    seq: U63
    code: Name
    text: LongText


class Explained(RankJson):
    """Answer to Explain: what the op waits for."""

    KIND = 70
    handle: U32
    seq: U63
    text: LongText


class Peeked(RankJson):
    """Answer to Peek."""

    KIND = 71
    snapshot: dict[str, JsonValue]


class Error(RankJson):
    """A request of the rank is refused; ``req`` is a Lease's number, 0 where it was another request."""

    KIND = 72
    code: Name
    text: LongText
    req: U32


class Note(RankJson):
    """A line for the people who run the rank."""

    KIND = 73
    handle: U32
    text: LongText


Json: TypeAlias = (
    Hello | Join | Leave | Bye | Peek | Stop | Welcome | Joined | Failed | Explained | Peeked | Error | Note
)  # fmt: skip
JSON: tuple[type[Json], ...] = (
    Hello, Join, Leave, Bye, Peek, Stop, Welcome, Joined, Failed, Explained, Peeked, Error, Note,
)  # fmt: skip
