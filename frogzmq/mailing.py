"""What the core and its driver say to each other about messages from one rank to another.

A message is named by its group, its two ranks and its number, which the sending rank counts from 1 for each
receiver. A receive is named by its rank and its number there. See ``frogzmq.machine`` for the rest of the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from frogzmq.types import Digest, GroupId

ANY_RANK = -1
"""Source of a receive that takes a message from whomever."""


class MailKey(NamedTuple):
    """Names one message."""

    gid: GroupId
    src: int
    dst: int
    n: int


# --------------------------------------------------------------------- events
@dataclass(slots=True)
class MailPosted:
    """A local rank sends a message; ``given``: all its bytes are in the driver's hands."""

    key: MailKey
    tag: int
    dtype: str
    size: int
    given: bool


@dataclass(slots=True)
class MailReady:
    """The first ``ready`` bytes of a local rank's message can be read."""

    key: MailKey
    ready: int


@dataclass(slots=True)
class ReceivePosted:
    """A local rank wants a message with this tag from ``src`` (or ``ANY_RANK``) into ``size`` bytes."""

    gid: GroupId
    rank: int
    n: int
    src: int
    tag: int
    dtype: str
    size: int


@dataclass(slots=True)
class MailTaken:
    """A local rank has copied what its receive ``n`` got out of the arena."""

    gid: GroupId
    rank: int
    n: int


@dataclass(slots=True)
class MailRead:
    """A local rank has read ``count`` inline messages of the group in all."""

    gid: GroupId
    rank: int
    count: int


@dataclass(slots=True)
class MailMade:
    """``MakeMail`` is done."""

    key: MailKey
    index: int
    digest: Digest


# -------------------------------------------------------------------- effects
@dataclass(slots=True)
class AskBytes:
    """Tell the sending rank, which is local, that the message's bytes are waited for."""

    key: MailKey


@dataclass(slots=True)
class MakeMail:
    """Hash bytes ``start`` to ``stop`` of a local rank's message: chunk ``index`` of it."""

    key: MailKey
    index: int
    start: int
    stop: int


@dataclass(slots=True)
class OpenMail:
    """Make room for a message of ``size`` bytes that another machine sends in chunks of ``chunk_bytes``."""

    key: MailKey
    size: int
    chunk_bytes: int


@dataclass(slots=True)
class DeliverMail:
    """Tell a local rank that the first ``upto`` of ``size`` bytes for its receive ``n`` can be read.

    ``inline``: all of them go to it at once, and the message is closed by the next effect.
    """

    key: MailKey
    n: int
    upto: int
    size: int
    inline: bool


@dataclass(slots=True)
class CloseMail:
    """Nobody needs the message's bytes any more; where its sender is local, it is told so."""

    key: MailKey


@dataclass(slots=True)
class FailReceive:
    """A local rank's receive ``n`` never gets its message."""

    gid: GroupId
    rank: int
    n: int
    code: str
    text: str


@dataclass(slots=True)
class FailMail:
    """A local rank's message never arrives: its receiver is gone."""

    key: MailKey
    code: str
    text: str


MailEvent: TypeAlias = MailPosted | MailReady | ReceivePosted | MailTaken | MailRead | MailMade
MailEffect: TypeAlias = (
    AskBytes | MakeMail | OpenMail | DeliverMail | CloseMail | FailReceive | FailMail
)  # fmt: skip
