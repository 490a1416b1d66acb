"""Messages between single ranks of one group, as one machine sees them: who sends, who receives, what meets.

Theory of operation
-------------------
The machine of the receiver decides which message meets which receive (``proto.mailbox``). Between two ranks
of one machine that is all: the receiver reads where the sender wrote. A message to another machine waits in
the ``Outbox`` until its bytes are wanted there; one from another machine in the ``Inbox`` until it is read.
A rank that could not hand its bytes over (too much lies unread) has only announced its message, and is
asked for the bytes when they are waited for: so any order of calls works that works where sends wait for
their receives.

Messages take no numbers of collectives. A receive that meets a message of another size or dtype fails the
group, as ranks that disagree on a collective do; so does whatever else fails the group, and then everything
here ends. A rank that leaves cleanly ends only what needs it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from frogzmq.machine import Effect
from frogzmq.mailing import (
    ANY_RANK,
    AskBytes,
    CloseMail,
    DeliverMail,
    FailMail,
    FailReceive,
    MailKey,
    MailPosted,
    ReceivePosted,
)
from frogzmq.proto.mailbox import Letter, Mailbox, Receiving
from frogzmq.proto.mailin import Inbox
from frogzmq.proto.mailout import Outbox
from frogzmq.proto.transfer import Transfer
from frogzmq.wire.limits import INLINE_BYTES, MAIL_UNREAD

if TYPE_CHECKING:
    from frogzmq.proto.postal import Postal

DELIVER_BYTES = 2 << 20
"""A receiver is told of more bytes in steps of this size."""
MAX_SHOWN = 64


class _Reader:
    """What a local rank has been sent inside datagrams (or is about to be), and not said that it read."""

    __slots__ = ("held", "read", "told")

    def __init__(self) -> None:
        self.told = self.read = 0
        self.held: deque[Letter] = deque()

    @property
    def full(self) -> bool:
        """Whether it should read first."""
        return bool(self.held) or self.told - self.read >= MAIL_UNREAD


class Mail:
    """All messages of a group on this machine."""

    def __init__(self, group: Postal, transfer: Transfer) -> None:
        self.group = group
        here = group.hosts[group.here].ranks
        self.boxes = {rank: Mailbox() for rank in here}
        self.readers = {rank: _Reader() for rank in here}
        self.outbox = Outbox(group, transfer)
        self.inbox = Inbox(group, self._visible)
        self.here: dict[MailKey, Letter] = {}
        """Messages between ranks of this machine."""
        self.matched: dict[tuple[int, int], Letter] = {}
        """By receiver and its receive: what is on its way to it, or being read by it."""
        self.gone: dict[int, str] = {}
        """Ranks that have left, and in which words."""
        self.totals: dict[tuple[int, int], int] = {}
        """(source, destination) of ranks elsewhere that have left: how many messages there were."""
        self.over = False
        self.sent = self.received = 0

    # ------------------------------------------------------------------- local ranks
    def posted(self, event: MailPosted, now: float, out: list[Effect]) -> None:
        """A local rank sends a message."""
        key = event.key
        if self.over or key.dst in self.gone:
            if not self.over:
                out.append(FailMail(key, "RankLost", self.gone[key.dst]))
            out.append(CloseMail(key))
            return
        self.sent += 1
        ready = event.size if event.given else -1
        letter = Letter(key, event.tag, event.dtype, event.size, now, True, ready=ready)
        if key.dst in self.boxes:
            self.here[key] = letter
            self._visible(letter, now, out)
        else:
            self.outbox.send(letter, now, out)

    def ready(self, key: MailKey, ready: int, now: float, out: list[Effect]) -> None:
        """A local rank has handed over more of a message's bytes."""
        letter = self.here.get(key)
        if letter is not None:
            letter.ready = max(letter.ready, ready)
            if letter.receive is not None:
                self._deliver(letter, letter.receive, now, out)
            return
        letter = self.outbox.letter(key)
        if letter is not None:
            letter.ready = max(letter.ready, ready)
            self.outbox.grown(letter, out)

    def receive(self, event: ReceivePosted, now: float, out: list[Effect]) -> None:
        """A local rank wants a message."""
        if self.over:
            return
        receive = Receiving(event.rank, event.n, event.src, event.tag, event.dtype, event.size, now)
        letter = self.boxes[event.rank].post(receive)
        if letter is not None:
            self._met(letter, receive, now, out)
        else:
            self._check_gone(event.rank, event.src, out)

    def taken(self, rank: int, n: int, now: float, out: list[Effect]) -> None:
        """A local rank has copied a large message out."""
        letter = self.matched.pop((rank, n), None)
        if letter is not None:
            self._close(letter, now, out)

    def read(self, rank: int, count: int, now: float, out: list[Effect]) -> None:
        """A local rank has read ``count`` inline messages in all."""
        reader = self.readers[rank]
        reader.read = min(max(reader.read, count), reader.told)
        while reader.held and reader.told - reader.read < MAIL_UNREAD:
            letter = reader.held.popleft()
            receive = letter.receive
            if receive is None or (rank, receive.n) not in self.matched:
                continue  # it was lost meanwhile
            if letter.complete:
                self._hand_over(letter, receive, now, out)
            else:
                self._ask(letter, reader, out)

    # ---------------------------------------------------------------------- meeting
    def _visible(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """A message has its turn in the mailbox of its receiver."""
        key = letter.key
        if key.dst in self.gone:
            self._close(letter, now, out)
            return
        receive = self.boxes[key.dst].arrive(letter)
        if receive is not None:
            self._met(letter, receive, now, out)
        if self.inbox.known(key.src, key.dst) == self.totals.get((key.src, key.dst)):
            self._check_gone(key.dst, key.src, out)

    def _met(self, letter: Letter, receive: Receiving, now: float, out: list[Effect]) -> None:
        key = letter.key
        if letter.lost:
            self._lose(letter, letter.lost, out)
            return
        if (letter.size, letter.dtype) != (receive.size, receive.dtype):
            group = self.group
            text = (
                f"ranks disagree on a message of group {group.name!r} with tag {letter.tag}: rank {key.src} "
                f"sent {letter.size} bytes of {letter.dtype}, rank {key.dst} called recv for {receive.size} "
                f"bytes of {receive.dtype}; send and recv must name tensors of one dtype and size"
            )
            group.fail(self.first(), "Mismatch", text, now, out)
            return
        self.matched[receive.rank, receive.n] = letter
        if not letter.local and not letter.complete:
            self.inbox.fetch(letter, now, out)
            return
        if letter.ready >= 0:
            self._deliver(letter, receive, now, out)
        elif letter.size > INLINE_BYTES:
            letter.asked = True
            out.append(AskBytes(key))
        elif self.readers[receive.rank].full:
            self.readers[receive.rank].held.append(letter)
        else:
            self._ask(letter, self.readers[receive.rank], out)

    def _ask(self, letter: Letter, reader: _Reader, out: list[Effect]) -> None:
        """Ask a local rank for a small message; its receiver reads it next."""
        letter.asked = letter.reserved = True
        reader.told += 1
        out.append(AskBytes(letter.key))

    def first(self) -> int:
        """The first collective that ends with the messages."""
        return max(self.group.done, *self.group.next_post.values(), 1)

    def _deliver(self, letter: Letter, receive: Receiving, now: float, out: list[Effect]) -> None:
        """Tell the receiver of what can be read by now."""
        if letter.size <= INLINE_BYTES:
            reader = self.readers[receive.rank]
            if letter.complete and letter.delivered < 0:
                letter.delivered = letter.size
                if reader.full and not letter.reserved:
                    reader.held.append(letter)
                else:
                    self._hand_over(letter, receive, now, out)
            return
        step = letter.ready - max(letter.delivered, 0)
        if letter.delivered < letter.size and (letter.complete or step >= DELIVER_BYTES):
            letter.delivered = letter.ready
            self.received += letter.complete
            out.append(DeliverMail(letter.key, receive.n, letter.ready, letter.size, False))

    def _hand_over(self, letter: Letter, receive: Receiving, now: float, out: list[Effect]) -> None:
        self.readers[receive.rank].told += not letter.reserved
        self.received += 1
        del self.matched[receive.rank, receive.n]
        out.append(DeliverMail(letter.key, receive.n, letter.size, letter.size, True))
        self._close(letter, now, out)

    def _close(self, letter: Letter, now: float, out: list[Effect]) -> None:
        if letter.local:
            self.here.pop(letter.key, None)
            out.append(CloseMail(letter.key))
        else:
            self.inbox.closed(letter, now, out)

    # --------------------------------------------------------------- other machines
    def grown(self, letter: Letter, now: float, out: list[Effect]) -> None:
        """More of a message from another machine is here."""
        if letter.receive is not None:
            self._deliver(letter, letter.receive, now, out)

    def lost(self, key: MailKey, text: str, out: list[Effect]) -> None:
        """The bytes of a message from another machine never come."""
        letter = self.inbox.letters.get(key)
        if letter is not None and not letter.complete:
            self._lose(letter, text, out)

    def _lose(self, letter: Letter, text: str, out: list[Effect]) -> None:
        letter.lost = text
        receive = letter.receive
        if receive is None:
            return  # whoever receives it hears of it
        self.matched.pop((receive.rank, receive.n), None)
        self.readers[receive.rank].told -= letter.reserved
        what = f"a message with tag {letter.tag} from rank {letter.key.src} never arrives: {text}"
        out.append(FailReceive(self.group.gid, receive.rank, receive.n, "RankLost", what))
        self._close(letter, letter.at, out)

    # ---------------------------------------------------------------------- endings
    def rank_left(self, rank: int, now: float, out: list[Effect]) -> None:
        """A local rank takes no further part: it reads nothing more, and gives nothing more."""
        if self.over:
            return
        for key in [key for key in self.matched if key[0] == rank]:
            self._close(self.matched.pop(key), now, out)
        self.readers[rank].held.clear()
        for letter in self.boxes[rank].letters():
            if letter.local and not letter.complete:
                out.append(FailMail(letter.key, "RankLost", f"{self.group.rank_text(rank)} has left"))
            self._close(letter, now, out)
        self.boxes[rank] = Mailbox()
        text = f"{self.group.rank_text(rank)} left before it gave the bytes"
        for letter in [one for one in self.here.values() if one.key.src == rank and not one.complete]:
            self._lose(letter, text, out)
        self.outbox.rank_left(rank, out)

    def rank_gone(self, rank: int, text: str, totals: list[tuple[int, int]], out: list[Effect]) -> None:
        """A rank, here or elsewhere, has left in good order. ``totals``: what it has sent, by receiver."""
        if self.over:
            return
        self.gone[rank] = text
        self.outbox.drop((rank,), text, out)
        sent = dict(totals)
        for dst in self.boxes:
            if rank not in self.boxes:
                self.totals[rank, dst] = sent.get(dst, 0)
            self._check_gone(dst, rank, out)
            self._check_gone(dst, ANY_RANK, out)

    def _silent(self, src: int, dst: int) -> bool:
        """Whether nothing new can come from ``src``: it has left, and everything it sent is known."""
        if src not in self.gone:
            return False
        return src in self.boxes or self.inbox.known(src, dst) >= self.totals.get((src, dst), 0)

    def _check_gone(self, dst: int, src: int, out: list[Effect]) -> None:
        """Fail receives that nobody is left for."""
        sources = [src] if src != ANY_RANK else [rank for rank in self.group.members if rank != dst]
        if not sources or not all(self._silent(rank, dst) for rank in sources):
            return
        text = self.gone[sources[-1]]
        if src == ANY_RANK:
            text = f"every other rank has left the group; {text}"
        box = self.boxes[dst]
        found = box.drop_receives(src)
        for receive in found:
            what = f"recv with tag {receive.tag} on rank {dst}: {text}"
            out.append(FailReceive(self.group.gid, dst, receive.n, "RankLost", what))
        if src != ANY_RANK:
            self._check_gone(dst, ANY_RANK, out)

    def host_gone(self, ranks: tuple[int, ...], text: str, out: list[Effect]) -> None:
        """A machine says and gives nothing more."""
        if self.over:
            return
        self.outbox.drop(ranks, text, out)
        for letter in self.inbox.incomplete_from(ranks):
            self._lose(letter, text, out)

    def fail(self, out: list[Effect]) -> None:
        """The group has failed: everything ends, but what a rank may still be reading stays until it has."""
        if self.over:
            return
        self.over = True
        reading = {
            receive: letter
            for receive, letter in self.matched.items()
            if letter.size > INLINE_BYTES and letter.delivered == letter.size
        }
        kept = {letter.key for letter in reading.values()}
        out.extend(CloseMail(key) for key in self.here if key not in kept)
        self.here = {key: letter for key, letter in self.here.items() if key in kept}
        self.matched = reading
        self.outbox.close(out)
        self.inbox.close(kept, out)
        self.boxes = {rank: Mailbox() for rank in self.boxes}
        self.readers = {rank: _Reader() for rank in self.readers}

    def close(self, out: list[Effect]) -> None:
        """The group is dropped."""
        self.fail(out)
        out.extend(CloseMail(letter.key) for letter in self.matched.values())
        self.matched.clear()

    @property
    def owes(self) -> bool:
        """Whether another machine may still need bytes that are only here."""
        return self.outbox.owes

    # ----------------------------------------------------------------------- time
    @property
    def deadline(self) -> float:
        """When ``tick`` wants to run."""
        return min(self.outbox.deadline, self.inbox.deadline)

    def tick(self, now: float, out: list[Effect]) -> None:
        """Do what is due."""
        self.outbox.tick(now, out)
        self.inbox.tick(now, out)

    # ---------------------------------------------------------------------- people
    def waiting(self) -> list[Letter | Receiving]:
        """Everything that is not over, oldest first."""
        found: list[Letter | Receiving] = [*self.here.values(), *self.inbox.letters.values()]
        found += [letter for pair in self.outbox.pairs.values() for letter in pair.letters.values()]
        for box in self.boxes.values():
            found += box.receives()
        return sorted(found, key=lambda one: one.at)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Messages and receives that wait, for ``peek``."""
        waiting = self.waiting()
        return {
            "sent": self.sent,
            "received": self.received,
            "repairs_asked": self.inbox.repairs,
            "repairs_answered": self.outbox.repairs,
            "waiting": [_row(one, now) for one in waiting[:MAX_SHOWN]],
            "waits": len(waiting),
        }

    def explain(self, rank: int, n: int) -> str:
        """What receive ``n`` of a local rank waits for (its message, or its bytes)."""
        letter = self.matched.get((rank, n))
        if letter is not None:
            where = self.group.rank_text(letter.key.src)
            return f"its message from {where} has {max(letter.ready, 0)} of {letter.size} bytes here"
        box = self.boxes.get(rank)
        if box is None:
            return f"rank {rank} is not on this machine"
        receive = next((one for one in box.receives() if one.n == n), None)
        if receive is None:
            return "it is over, or not known here"
        others = [letter for letter in box.letters() if receive.src in (ANY_RANK, letter.key.src)]
        if not others:
            return "no message is there that nobody has received"
        shown = ", ".join(f"tag {o.tag} from rank {o.key.src} ({o.size} bytes)" for o in others[:8])
        return f"{len(others)} messages are there that nobody has received, with other tags: {shown}"


def _row(one: Letter | Receiving, now: float) -> dict[str, Any]:
    if isinstance(one, Receiving):
        fields = {"what": "recv", "rank": one.rank, "peer_rank": one.src}
    else:
        fields = {"what": "send", "rank": one.key.src, "peer_rank": one.key.dst}
    return {**fields, "tag": one.tag, "bytes": one.size, "dtype": one.dtype, "age_s": now - one.at}
