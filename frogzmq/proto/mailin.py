"""Messages from ranks of other machines to ranks of this one, until they have been handed over.

Messages become visible in the order of their numbers, whatever order they came in. The bytes of one that
was only offered are asked for when a receive matches it, and placed where the receiving rank reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from frogzmq.machine import Effect, Send
from frogzmq.mailing import CloseMail, MailKey, OpenMail
from frogzmq.proto.mailbox import Letter
from frogzmq.proto.mailout import LETTER_BYTES, SLOWEST, early_room
from frogzmq.types import PeerId
from frogzmq.wire.limits import MAIL_ITEMS, MAIL_WINDOW
from frogzmq.wire.mail import read_address, split_seq
from frogzmq.wire.messages import ChunkHeader, MailAsk, MailOffer, MailSeen, MailWant

if TYPE_CHECKING:
    from frogzmq.proto.postal import Postal

OPEN_BYTES = 256 << 20
"""Room for messages that are being fetched, in one group; one larger message may be fetched alone."""
MAX_STASH = 4096
"""Messages of a pair of ranks that came ahead of one that was lost; more are said again later."""
SAY_DELAY_S = 0.02
"""After this long the sender is told what has arrived and been taken; sooner where that frees much."""
SAY_COUNT = 16
SAY_BYTES = 256 << 10
PATIENCE_REJECTS = 3
"""Damaged copies of one chunk before the group fails and names who sent them."""
WANT_AT_ONCE = 64


class _Pair:
    """What one rank elsewhere has sent to one rank here."""

    __slots__ = ("early", "known", "open", "rejects", "say_at", "stash", "taken", "taken_bytes")

    def __init__(self) -> None:
        self.known = self.open = self.early = self.taken_bytes = 0
        self.stash: dict[int, Letter] = {}
        self.taken: list[int] = []
        self.say_at = float("inf")
        self.rejects = 0


class Inbox:
    """All messages of a group that come from other machines. ``visible``: a message has its turn."""

    def __init__(self, group: Postal, visible: Callable[[Letter, float, list[Effect]], None]) -> None:
        self.group, self.visible = group, visible
        self.pairs: dict[tuple[int, int], _Pair] = {}
        self.letters: dict[MailKey, Letter] = {}
        self.deadline = float("inf")
        self.open_bytes = 0
        self.fetching: dict[MailKey, Letter] = {}
        """Asked for, and not all here."""
        self.queue: deque[Letter] = deque()
        """Matched, and waiting for room."""
        self.repairs = 0

    def _peer(self, src: int) -> PeerId:
        return PeerId(self.group.members[src].who.peer)

    def _sent_by(self, peer: PeerId, src: int, dst: int) -> bool:
        """Whether this is a message that ``peer`` may send us."""
        member = self.group.members.get(src)
        return (
            member is not None and member.who.peer == peer and dst in self.group.hosts[self.group.here].ranks
        )

    # -------------------------------------------------------------------- arrivals
    def offer(self, peer: PeerId, message: MailOffer, now: float, out: list[Effect]) -> None:
        """A message waits at its sender."""
        if not self._sent_by(peer, message.src, message.dst) or message.n < 1:
            return
        key = MailKey(self.group.gid, message.src, message.dst, message.n)
        self._learn(Letter(key, message.tag, message.dtype, message.size, now, False), now, out)

    def accepts(self, peer: PeerId, header: ChunkHeader) -> bool:
        """Whether a chunk's bytes should be kept."""
        dst, n = split_seq(header.seq)
        if not self._sent_by(peer, header.part, dst) or n < 1:
            return False
        pair = self.pairs.get((header.part, dst))
        letter = self.letters.get(MailKey(self.group.gid, header.part, dst, n))
        if letter is None and pair is not None:
            letter = pair.stash.get(n)
        if letter is not None:
            return self._due(letter, header, pair)
        known = pair.known if pair is not None else 0
        return known < n <= known + MAIL_WINDOW and self._fits(header, pair)

    def _fits(self, header: ChunkHeader, pair: _Pair | None) -> bool:
        """Whether there is room for a whole message that came unasked."""
        early = pair.early if pair is not None else 0
        room = early_room(self.group, self.group.here)
        small = header.size <= self.group.settings.chunk_bytes
        return header.index == 0 and small and early + header.size + LETTER_BYTES <= room

    def _due(self, letter: Letter, header: ChunkHeader, pair: _Pair | None) -> bool:
        if letter.complete or read_address(header.descriptor) != (letter.tag, letter.dtype):
            return False
        if letter.have is None:
            return header.size == letter.size and not letter.lost and self._fits(header, pair)
        step = self.group.settings.chunk_bytes
        return (
            header.index < letter.chunks
            and header.size == min(step, letter.size - header.index * step)
            and not letter.have[header.index]
        )

    def chunk(self, header: ChunkHeader, now: float, out: list[Effect]) -> Letter | None:
        """A verified chunk that ``accepts`` said yes to: the message whose bytes have grown, if one has."""
        dst, n = split_seq(header.seq)
        key = MailKey(self.group.gid, header.part, dst, n)
        pair = self.pairs.setdefault((key.src, key.dst), _Pair())
        letter = self.letters.get(key) or pair.stash.get(n)
        if letter is None:
            tag, dtype = read_address(header.descriptor)
            cost = header.size + LETTER_BYTES
            letter = Letter(key, tag, dtype, header.size, now, False, ready=header.size, cost=cost)
            self._learn(letter, now, out)
            return None
        if letter.have is None:
            return self._whole(letter, pair)
        letter.have[header.index] = 1
        letter.left -= 1
        letter.repair_at = now + self.group.settings.repair_after_s
        if header.index != letter.prefix:
            return None
        gap = letter.have.find(0, header.index)
        letter.prefix = letter.chunks if gap < 0 else gap
        letter.ready = min(letter.prefix * self.group.settings.chunk_bytes, letter.size)
        if letter.left == 0:
            self._took(letter, now, out)
        return letter

    def _whole(self, letter: Letter, pair: _Pair) -> Letter:
        """A message that was offered comes whole before it was asked for."""
        letter.ready, letter.cost = letter.size, letter.size + LETTER_BYTES
        pair.early += letter.cost
        if letter in self.queue:
            self.queue.remove(letter)
        return letter

    def _learn(self, letter: Letter, now: float, out: list[Effect]) -> None:
        key = letter.key
        pair = self.pairs.setdefault((key.src, key.dst), _Pair())
        self._say_soon(pair, now + SAY_DELAY_S)
        ahead = key.n > pair.known + 1
        if key.n <= pair.known or key.n in pair.stash or (ahead and len(pair.stash) >= MAX_STASH):
            if letter.cost and key not in self.letters and key.n not in pair.stash:
                out.append(CloseMail(key))
            return
        pair.early += letter.cost
        pair.stash[key.n] = letter
        while (pair.known + 1) in pair.stash and pair.open < MAIL_WINDOW:
            pair.known += 1
            pair.open += 1
            found = pair.stash.pop(pair.known)
            self.letters[found.key] = found
            self.visible(found, now, out)

    def rejected(self, peer: PeerId, header: ChunkHeader, now: float, out: list[Effect]) -> str:
        """A damaged chunk: ask for it again. Returns what is wrong where that has been done enough."""
        if not self.accepts(peer, header):
            return ""
        dst, n = split_seq(header.seq)
        key = MailKey(self.group.gid, header.part, dst, n)
        letter = self.letters.get(key)
        pair = self.pairs.setdefault((key.src, key.dst), _Pair())
        if letter is not None:
            letter.rejects += 1
        else:
            pair.rejects += 1
        if (letter.rejects if letter is not None else pair.rejects) >= PATIENCE_REJECTS:
            host = self.group.machine(self.group.host_of[peer])
            return (
                f"chunks of message {n} from rank {key.src} to rank {dst} arrived damaged "
                f"{PATIENCE_REJECTS} times from {host}; check that machine's memory, disk and network"
            )
        self._want(key, [header.index], out)
        return ""

    # -------------------------------------------------------------------- fetching
    def fetch(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """A receive matches a message whose bytes are not here."""
        self.queue.append(letter)
        self._fetch_more(now, out)

    def _fetch_more(self, now: float, out: list[Effect]) -> None:
        while self.queue and (not self.open_bytes or self.open_bytes + self.queue[0].size <= OPEN_BYTES):
            letter = self.queue.popleft()
            self.open_bytes += letter.size
            step = self.group.settings.chunk_bytes
            letter.chunks = letter.left = max(1, -(-letter.size // step))
            letter.have = bytearray(letter.chunks)
            letter.repair_wait = self.group.settings.repair_after_s
            letter.repair_at = now + letter.repair_wait
            self.deadline = min(self.deadline, letter.repair_at)
            self.fetching[letter.key] = letter
            out.append(OpenMail(letter.key, letter.size, step))
            self._want(letter.key, [], out)

    def _want(self, key: MailKey, chunks: list[int], out: list[Effect]) -> None:
        self.repairs += len(chunks)
        want = MailWant(gid=self.group.hex, src=key.src, dst=key.dst, n=key.n, chunks=chunks)
        out.append(Send(self._peer(key.src), want))

    # ---------------------------------------------------------------------- taken
    def closed(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """The message's bytes are not needed here any more."""
        out.append(CloseMail(letter.key))
        self.forget(letter, now, out)

    def forget(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """The sender need not keep a message that is over here; there is room for the next one."""
        if letter.key in self.letters:
            self._took(letter, now, out)
        if letter.have is not None:
            letter.have = None
            self.open_bytes = max(0, self.open_bytes - letter.size)
            self._fetch_more(now, out)
        elif letter in self.queue:
            self.queue.remove(letter)

    def _took(self, letter: Letter, now: float, out: list[Effect]) -> None:
        del self.letters[letter.key]
        self.fetching.pop(letter.key, None)
        pair = self.pairs[letter.key.src, letter.key.dst]
        pair.early -= letter.cost
        pair.open -= 1
        pair.rejects = 0
        pair.taken.append(letter.key.n)
        pair.taken_bytes += letter.size
        if len(pair.taken) >= SAY_COUNT or pair.taken_bytes >= SAY_BYTES:
            self._say(letter.key.src, letter.key.dst, pair, 0, out)
        else:
            self._say_soon(pair, now + SAY_DELAY_S)

    def _say_soon(self, pair: _Pair, at: float) -> None:
        pair.say_at = min(pair.say_at, at)
        self.deadline = min(self.deadline, pair.say_at)

    def _say(self, src: int, dst: int, pair: _Pair, answers: int, out: list[Effect]) -> None:
        while True:
            numbers, pair.taken = pair.taken[:MAIL_ITEMS], pair.taken[MAIL_ITEMS:]
            seen = MailSeen(
                gid=self.group.hex, src=src, dst=dst, known=pair.known, numbers=numbers, answers=answers
            )
            out.append(Send(self._peer(src), seen))
            answers = 0
            if not pair.taken:
                break
        pair.taken_bytes = 0
        pair.say_at = float("inf")

    def ask(self, peer: PeerId, message: MailAsk, out: list[Effect]) -> None:
        """The sender's machine asks what is known here, and whether it may forget."""
        if not self._sent_by(peer, message.src, message.dst):
            return
        pair = self.pairs.setdefault((message.src, message.dst), _Pair())
        gid = self.group.gid
        over = [
            n
            for n in message.numbers
            if n <= pair.known and MailKey(gid, message.src, message.dst, n) not in self.letters
        ]
        pair.taken = list(dict.fromkeys([*over, *pair.taken]))
        self._say(message.src, message.dst, pair, message.upto, out)

    # -------------------------------------------------------------------- endings
    def known(self, src: int, dst: int) -> int:
        """Up to which number messages of this pair are known."""
        pair = self.pairs.get((src, dst))
        return pair.known if pair is not None else 0

    def incomplete_from(self, srcs: tuple[int, ...]) -> list[Letter]:
        """Messages of these ranks whose bytes are not all here."""
        return [letter for letter in self.letters.values() if letter.key.src in srcs and not letter.complete]

    def close(self, reading: set[MailKey], out: list[Effect]) -> None:
        """Forget everything but what ranks are ``reading``."""
        here = [letter for letter in self.letters.values() if letter.have is not None or letter.complete]
        out.extend(CloseMail(letter.key) for letter in here if letter.key not in reading)
        for pair in self.pairs.values():
            out.extend(CloseMail(letter.key) for letter in pair.stash.values() if letter.cost)
        self.letters.clear()
        self.fetching.clear()
        self.pairs.clear()
        self.queue.clear()
        self.open_bytes = 0
        self.deadline = float("inf")

    # ----------------------------------------------------------------------- time
    def tick(self, now: float, out: list[Effect]) -> None:
        """Say what was taken; ask again for what does not come."""
        if now < self.deadline:
            return
        deadline = float("inf")
        for (src, dst), pair in self.pairs.items():
            if now >= pair.say_at:
                self._say(src, dst, pair, 0, out)
            deadline = min(deadline, pair.say_at)
        quiet = self.group.settings.repair_after_s
        for letter in self.fetching.values():
            if letter.have is not None and now >= letter.repair_at:
                missing = [index for index in range(letter.prefix, letter.chunks) if not letter.have[index]]
                self._want(letter.key, missing[:WANT_AT_ONCE], out)
                letter.repair_wait = min(letter.repair_wait * 2, SLOWEST * quiet)
                letter.repair_at = now + letter.repair_wait
            deadline = min(deadline, letter.repair_at)
        self.deadline = deadline
