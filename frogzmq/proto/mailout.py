"""Messages from ranks of this machine to ranks of others, until the machine of the receiver has them.

A message of one chunk is pushed unasked while the receiver's machine has room set aside for this pair of
ranks; any other is offered, and its chunks go when a receive asks for them. One whose bytes the rank has yet
to write is offered too, for the order. Nothing is forgotten before the other
side has said that it needs no more of it. Where that word does not come, it is asked for (``MailAsk``), and
what turns out to be unknown there is said again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frogzmq.machine import Effect, Send, SendChunk
from frogzmq.mailing import AskBytes, CloseMail, FailMail, MailKey, MakeMail
from frogzmq.proto.mailbox import Letter
from frogzmq.proto.transfer import Transfer
from frogzmq.types import Digest, PeerId, Role
from frogzmq.wire.limits import MAIL_ITEMS
from frogzmq.wire.mail import address, mail_seq
from frogzmq.wire.messages import ChunkHeader, MailAsk, MailLost, MailOffer, MailSeen, MailWant

if TYPE_CHECKING:
    from frogzmq.proto.postal import Postal

EARLY_BYTES = 64 << 20
"""Room that a machine has for messages that come unasked in one group, shared by all pairs of ranks."""
PAIR_BYTES = 2 << 20
"""The most that one pair of ranks has of it."""
LETTER_BYTES = 512
"""What even an empty message costs of it."""
SAY_AGAIN = 64
"""Messages that are said again at once."""
SLOWEST = 8
"""Times the first pause: the longest one between two questions."""


def early_room(group: Postal, host: int) -> int:
    """Bytes that may lie unasked on machine ``host`` for each pair of ranks: both sides know it."""
    there = len(group.hosts[host].ranks)
    return min(PAIR_BYTES, EARLY_BYTES // max(1, there * (group.size - there)))


class _Pair:
    """What one rank has sent to another."""

    __slots__ = ("early", "known", "letters", "peer", "repair_at", "repair_wait", "room", "sent")

    def __init__(self, peer: PeerId, room: int) -> None:
        self.peer, self.room = peer, room
        self.letters: dict[int, Letter] = {}
        self.sent = self.known = self.early = 0
        self.repair_at = float("inf")
        self.repair_wait = 0.0


class Outbox:
    """All messages of a group that leave this machine."""

    def __init__(self, group: Postal, transfer: Transfer) -> None:
        self.group, self.transfer = group, transfer
        self.pairs: dict[tuple[int, int], _Pair] = {}
        self.deadline = float("inf")
        self.repairs = 0

    def letter(self, key: MailKey) -> Letter | None:
        """A message that is still needed."""
        pair = self.pairs.get((key.src, key.dst))
        return pair.letters.get(key.n) if pair is not None else None

    def _peer(self, dst: int) -> PeerId:
        return PeerId(self.group.members[dst].who.peer)

    # ------------------------------------------------------------------- sending
    def send(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """A local rank sends a message."""
        key, group = letter.key, self.group
        pair = self.pairs.get((key.src, key.dst))
        if pair is None:
            peer = self._peer(key.dst)
            pair = self.pairs[key.src, key.dst] = _Pair(peer, early_room(group, group.host_of[peer]))
        pair.sent = key.n
        pair.letters[key.n] = letter
        letter.chunks = max(1, -(-letter.size // group.settings.chunk_bytes))
        if not self._unasked(letter, pair, out):
            letter.offered = True
            self._offer(letter, out)
        if pair.repair_at == float("inf"):
            self._arm(pair, now)

    def _unasked(self, letter: Letter, pair: _Pair, out: list[Effect]) -> bool:
        """Push a message of one chunk where the other machine has room for it."""
        cost = letter.size + LETTER_BYTES
        if letter.wanted or not letter.complete or letter.chunks > 1 or pair.early + cost > pair.room:
            return False
        letter.cost, letter.wanted = cost, True
        pair.early += cost
        self.make(letter, out)
        return True

    def grown(self, letter: Letter, out: list[Effect]) -> None:
        """A local rank has given more bytes."""
        if letter.wanted:
            self.make(letter, out)
        else:
            self._unasked(letter, self.pairs[letter.key.src, letter.key.dst], out)

    def _arm(self, pair: _Pair, now: float, times: int = 1) -> None:
        pair.repair_wait = times * self.group.settings.repair_after_s
        pair.repair_at = now + pair.repair_wait
        self.deadline = min(self.deadline, pair.repair_at)

    def _offer(self, letter: Letter, out: list[Effect]) -> None:
        key = letter.key
        message = MailOffer(
            gid=self.group.hex, src=key.src, dst=key.dst, n=key.n, tag=letter.tag, size=letter.size,
            dtype=letter.dtype,
        )  # fmt: skip
        out.append(Send(self._peer(key.dst), message))

    def make(self, letter: Letter, out: list[Effect]) -> None:
        """Have those chunks hashed that are wanted and can be read."""
        step = self.group.settings.chunk_bytes
        while letter.wanted and letter.next < letter.chunks:
            start = letter.next * step
            stop = min(start + step, letter.size)
            if stop > letter.ready:
                return
            out.append(MakeMail(letter.key, letter.next, start, stop))
            letter.next += 1

    def made(self, letter: Letter, index: int, digest: Digest, out: list[Effect]) -> None:
        """A chunk is hashed: it goes."""
        letter.digests[index] = digest
        self._push(letter, index, out)

    def _push(self, letter: Letter, index: int, out: list[Effect]) -> None:
        key, step = letter.key, self.group.settings.chunk_bytes
        size = min(step, letter.size - index * step)
        header = ChunkHeader(
            key.gid, mail_seq(key.dst, key.n), Role.MAIL, key.src, index, size, letter.digests[index],
            address(letter.tag, letter.dtype), 0,
        )  # fmt: skip
        out.append(SendChunk(self._peer(key.dst), header))

    def _close(self, letter: Letter, out: list[Effect]) -> None:
        key = letter.key
        self.transfer.drop_op(key.gid, mail_seq(key.dst, key.n), key.src)
        out.append(CloseMail(key))

    # ------------------------------------------------------- what the other side says
    def want(self, message: MailWant, peer: PeerId, out: list[Effect]) -> None:
        """A receive there waits for the message."""
        key = MailKey(self.group.gid, message.src, message.dst, message.n)
        letter = self.letter(key)
        if letter is None:
            text = f"{self.group.rank_text(key.src)} left before its message was fetched"
            lost = MailLost(gid=self.group.hex, src=key.src, dst=key.dst, n=key.n, text=text)
            out.append(Send(peer, lost))
            return
        letter.wanted = True
        if letter.ready < 0 and not letter.asked:
            letter.asked = True
            out.append(AskBytes(key))
        for index in message.chunks:
            if index in letter.digests and not self._queued(peer, letter, index):
                self.repairs += 1
                self._push(letter, index, out)
        self.make(letter, out)

    def _queued(self, peer: PeerId, letter: Letter, index: int) -> bool:
        key = letter.key
        return self.transfer.queued(peer, key.gid, mail_seq(key.dst, key.n), (int(Role.MAIL), key.src, index))

    def seen(self, message: MailSeen, now: float, out: list[Effect]) -> None:
        """What the other machine knows, and what it needs no more."""
        pair = self.pairs.get((message.src, message.dst))
        if pair is None:
            return
        pair.known = max(pair.known, min(message.known, pair.sent))
        for n in message.numbers:
            letter = pair.letters.pop(n, None)
            if letter is not None:
                pair.early -= letter.cost
                self._close(letter, out)
        if message.answers > message.known:
            missing = [n for n in pair.letters if message.known < n <= message.answers]
            for n in missing[:SAY_AGAIN]:
                self._again(pair.letters[n], out)
        if pair.letters:
            self._arm(pair, now, SLOWEST if pair.known == pair.sent else 1)
        else:
            pair.repair_at = float("inf")

    def _again(self, letter: Letter, out: list[Effect]) -> None:
        peer = self._peer(letter.key.dst)
        if letter.offered:
            self._offer(letter, out)
        if letter.cost and 0 in letter.digests and not self._queued(peer, letter, 0):
            self.repairs += 1
            self._push(letter, 0, out)

    # -------------------------------------------------------------------- endings
    def drop(self, dsts: tuple[int, ...], text: str, out: list[Effect]) -> None:
        """Ranks elsewhere are gone: what was on its way to them is not needed; what was not given, fails."""
        for (_, dst), pair in self.pairs.items():
            if dst in dsts:
                for letter in pair.letters.values():
                    if not letter.complete:
                        out.append(FailMail(letter.key, "RankLost", text))
                    self._close(letter, out)
                pair.letters.clear()
                pair.early, pair.repair_at = 0, float("inf")

    def rank_left(self, rank: int, out: list[Effect]) -> None:
        """A local rank is gone: what it has not given never comes."""
        for (src, _), pair in self.pairs.items():
            if src == rank:
                for n in [n for n, letter in pair.letters.items() if not letter.complete]:
                    self._close(pair.letters.pop(n), out)

    def sent_by(self, rank: int) -> list[tuple[int, int]]:
        """How many messages a local rank has sent, by receiver on other machines."""
        return [(dst, pair.sent) for (src, dst), pair in self.pairs.items() if src == rank]

    @property
    def owes(self) -> bool:
        """Whether another machine may still need bytes that are only here."""
        rows = [(pair, n, letter) for pair in self.pairs.values() for n, letter in pair.letters.items()]
        return any(letter.offered or n > pair.known for pair, n, letter in rows)

    def close(self, out: list[Effect]) -> None:
        """Forget everything."""
        for pair in self.pairs.values():
            for letter in pair.letters.values():
                self._close(letter, out)
            pair.letters.clear()
            pair.repair_at = float("inf")
        self.deadline = float("inf")

    # ----------------------------------------------------------------------- time
    def tick(self, now: float, out: list[Effect]) -> None:
        """Ask those that have not said for a while what they know."""
        if now < self.deadline:
            return
        slowest = SLOWEST * self.group.settings.repair_after_s
        for (src, dst), pair in self.pairs.items():
            if now >= pair.repair_at:
                numbers = [n for n in pair.letters if n <= pair.known][:MAIL_ITEMS]
                ask = MailAsk(gid=self.group.hex, src=src, dst=dst, upto=pair.sent, numbers=numbers)
                out.append(Send(self._peer(dst), ask))
                pair.repair_wait = min(pair.repair_wait * 2, slowest)
                pair.repair_at = now + pair.repair_wait
        self.deadline = min((pair.repair_at for pair in self.pairs.values()), default=float("inf"))
