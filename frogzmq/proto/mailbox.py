"""Which message meets which receive: the mailbox of one rank in one group.

Messages enter in the order of their numbers for each sender. A receive takes the earliest message that
fits; a message goes to the earliest receive that fits. So messages with one tag between two ranks are
received in the order in which they were sent, and different tags do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from frogzmq.mailing import ANY_RANK, MailKey
from frogzmq.types import Digest


@dataclass(slots=True, eq=False)
class Receiving:
    """A receive that a local rank has posted."""

    rank: int
    n: int
    src: int
    tag: int
    dtype: str
    size: int
    at: float
    order: int = 0
    letter: Letter | None = None


@dataclass(slots=True, eq=False)
class Letter:
    """A message as the machine of its receiver, or of its sender, knows it."""

    key: MailKey
    tag: int
    dtype: str
    size: int
    at: float
    local: bool
    """Sent by a rank of this machine."""
    ready: int = -1
    """How many bytes from its start can be read here; -1: none were given, not even of an empty one."""
    order: int = 0
    receive: Receiving | None = None
    delivered: int = -1
    """How many bytes its receiver was told of."""
    lost: str = ""
    """Why its bytes never come."""
    reserved: bool = False
    """It counts among what its receiver has to read, before its bytes are here."""
    # What a message to or from another machine needs besides.
    chunks: int = 1
    next: int = 0
    """Sent: chunks handed out for hashing."""
    digests: dict[int, Digest] = field(default_factory=dict)
    offered: bool = False
    wanted: bool = False
    asked: bool = False
    cost: int = 0
    """Of the receiver's room for messages that come unasked."""
    have: bytearray | None = None
    """Received: which chunks are here, once its room is open."""
    left: int = 0
    prefix: int = 0
    rejects: int = 0
    repair_at: float = float("inf")
    repair_wait: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all its bytes can be read here."""
        return self.ready == self.size


class Mailbox:
    """Unmatched messages and receives of one rank."""

    def __init__(self) -> None:
        self._letters: dict[int, dict[int, deque[Letter]]] = {}
        self._receives: dict[tuple[int, int], deque[Receiving]] = {}
        self._count = 0
        self.waiting = 0
        """Receives without a message."""

    def arrive(self, letter: Letter) -> Receiving | None:
        """A message enters: the receive that gets it, or None while there is none."""
        src, tag = letter.key.src, letter.tag
        named = self._receives.get((src, tag))
        other = self._receives.get((ANY_RANK, tag))
        if named and other:
            queue = named if named[0].order < other[0].order else other
        else:
            queue = named or other or deque()
        if queue:
            receive = queue.popleft()
            if not queue:
                del self._receives[receive.src, tag]
            self.waiting -= 1
            letter.receive, receive.letter = receive, letter
            return receive
        self._count += 1
        letter.order = self._count
        self._letters.setdefault(tag, {}).setdefault(src, deque()).append(letter)
        return None

    def post(self, receive: Receiving) -> Letter | None:
        """A receive enters: the message that it gets, or None while there is none."""
        sources = self._letters.get(receive.tag, {})
        if receive.src == ANY_RANK:
            queue = min(sources.values(), key=lambda queue: queue[0].order, default=None)
        else:
            queue = sources.get(receive.src)
        if queue:
            letter = queue.popleft()
            if not queue:
                del sources[letter.key.src]
                if not sources:
                    del self._letters[receive.tag]
            letter.receive, receive.letter = receive, letter
            return letter
        self._count += 1
        receive.order = self._count
        self._receives.setdefault((receive.src, receive.tag), deque()).append(receive)
        self.waiting += 1
        return None

    def letters(self) -> list[Letter]:
        """Messages that nobody has asked for yet, in the order of arrival."""
        found = [
            letter for sources in self._letters.values() for queue in sources.values() for letter in queue
        ]
        return sorted(found, key=lambda letter: letter.order)

    def receives(self) -> list[Receiving]:
        """Receives without a message, in the order of their calls."""
        found = [receive for queue in self._receives.values() for receive in queue]
        return sorted(found, key=lambda receive: receive.order)

    def drop_receives(self, src: int) -> list[Receiving]:
        """Take out the receives that name ``src`` as their source."""
        found: list[Receiving] = []
        for key in [key for key in self._receives if key[0] == src]:
            found += self._receives.pop(key)
        self.waiting -= len(found)
        return sorted(found, key=lambda receive: receive.order)
