"""Messages between ranks, the machine alone: whatever a network does to what machines say to each other."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frogzmq.machine import Effect, Fail, Send, SendChunk
from frogzmq.mailing import (
    ANY_RANK,
    AskBytes,
    CloseMail,
    DeliverMail,
    FailReceive,
    MailKey,
    MailMade,
    MailPosted,
    MailRead,
    MailReady,
    MailTaken,
    MakeMail,
    OpenMail,
    ReceivePosted,
)
from frogzmq.proto.group import Group
from frogzmq.proto.mailbox import Letter, Mailbox, Receiving
from frogzmq.proto.mailout import EARLY_BYTES, PAIR_BYTES, early_room
from frogzmq.proto.mailroom import MailRoom
from frogzmq.proto.settings import CoreSettings
from frogzmq.proto.transfer import Transfer
from frogzmq.types import Digest, GroupId, PeerId, Role
from frogzmq.wire.limits import DTYPE_CHARS, INLINE_BYTES
from frogzmq.wire.mail import address, mail_seq, mark_of, read_address, split_seq
from frogzmq.wire.messages import ChunkHeader, GroupFailed, GroupOptions, Identity, JoinGroup, Member

GID = GroupId(bytes(range(16)))
CHUNK = 1000
SETTINGS = CoreSettings(chunk_bytes=CHUNK)


def group_of(hosts: list[int], here: int) -> Group:
    """A settled group as machine ``here`` knows it; ``hosts[i]`` ranks live on machine i."""
    members = []
    for host, count in enumerate(hosts):
        who = Identity(peer=f"{host:016x}", instance=f"i{host}", name=f"m{host}", endpoints=[])
        members += [
            Member(rank=len(members) + i, pid=100 + len(members) + i, host=f"m{host}", who=who)
            for i in range(count)
        ]
    join = JoinGroup(
        gid=GID.hex(), job="j", name="g", rank=0, size=len(members), timeout_s=9.0, options=GroupOptions(),
        members=members,
    )  # fmt: skip
    group = Group(join, PeerId(f"{here:016x}"), SETTINGS, Transfer(1 << 40))
    group.local = dict.fromkeys(group.hosts[group.here].ranks, True)
    return group


class Net:
    """Machines, what they have said to each other and nobody has heard yet, and what ranks got."""

    def __init__(self, hosts: list[int]) -> None:
        self.now = 0.0
        self.groups = [group_of(hosts, here) for here in range(len(hosts))]
        self.rooms = [MailRoom({GID: group}, lambda group, now, out: None) for group in self.groups]
        self.host_of = {
            rank: g.host_of[PeerId(m.who.peer)] for g in self.groups for rank, m in g.members.items()
        }
        self.under_way: list[tuple[int, int, Any]] = []
        self.got: dict[tuple[int, int], MailKey] = {}
        self.failed: dict[tuple[int, int], str] = {}
        self.errors: dict[int, str] = {}
        self.given: dict[MailKey, int] = {}
        self.open: dict[tuple[int, MailKey], bool] = {}
        self.read: dict[int, int] = defaultdict(int)
        self.number: dict[tuple[int, int], int] = defaultdict(int)
        self.receives: dict[int, int] = defaultdict(int)

    # ---------------------------------------------------------------------- ranks
    def send(self, src: int, dst: int, tag: int, size: int, given: bool = True) -> MailKey:
        self.number[src, dst] += 1
        key = MailKey(GID, src, dst, self.number[src, dst])
        self.given[key] = size
        self.event(self.host_of[src], MailPosted(key, tag, "uint8", size, given))
        return key

    def receive(self, rank: int, src: int, tag: int, size: int) -> tuple[int, int]:
        self.receives[rank] += 1
        n = self.receives[rank]
        self.event(self.host_of[rank], ReceivePosted(GID, rank, n, src, tag, "uint8", size))
        return rank, n

    # -------------------------------------------------------------------- driving
    def event(self, host: int, event: object) -> None:
        pending = [event]
        while pending:
            one = pending.pop(0)
            out: list[Effect] = []
            self.rooms[host].events[type(one)](one, self.now, out)
            pending += self.carry_out(host, out)

    def carry_out(self, host: int, out: list[Effect]) -> list[object]:  # noqa: C901 - one case per effect
        events: list[object] = []
        for effect in out:
            match effect:
                case Send() | SendChunk():
                    what = effect.message if isinstance(effect, Send) else effect.header
                    self.under_way.append((host, int(effect.peer, 16), what))
                case MakeMail(key, index, _, stop):
                    assert stop <= self.given[key]
                    digest = Digest(hashlib.sha256(repr((key, index)).encode()).digest())
                    events.append(MailMade(key, index, digest))
                case AskBytes(key):
                    events.append(MailReady(key, self.given[key]))
                case OpenMail(key):
                    assert (host, key) not in self.open
                    self.open[host, key] = True
                case DeliverMail(key, n, upto, size, inline):
                    assert size == self.given[key]
                    if upto == size:
                        assert (key.dst, n) not in self.got, "one receive, one message"
                        assert key not in self.got.values(), "one message, one receive"
                        self.got[key.dst, n] = key
                        self.read[key.dst] += inline
                        if inline:
                            events.append(MailRead(GID, key.dst, self.read[key.dst]))
                        else:
                            events.append(MailTaken(GID, key.dst, n))
                case CloseMail(key):
                    self.open.pop((host, key), None)
                case FailReceive(_, rank, n, _, text):
                    self.failed[rank, n] = text
                case Fail(_, rank, _, code, text):
                    self.errors.setdefault(rank, f"{code}: {text}")
        return events

    def hear(self, index: int) -> None:
        """A machine takes one of the things that are under way."""
        source, target, what = self.under_way.pop(index)
        room, group, out = self.rooms[target], self.groups[target], []
        peer = PeerId(f"{source:016x}")
        if isinstance(what, GroupFailed):
            group.fail(what.seq, what.code, what.text, self.now, out, tell=False)
        elif not isinstance(what, ChunkHeader):
            room.messages[type(what)](peer, what, self.now, out)
        elif room.accepts(group, peer, what):
            room.chunk(group, what, self.now, out)
        for event in self.carry_out(target, out):
            self.event(target, event)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for host, group in enumerate(self.groups):
            out: list[Effect] = []
            group.mail.tick(self.now, out)
            for event in self.carry_out(host, out):
                self.event(host, event)

    def calm(self, rounds: int = 60) -> None:
        """From now on everything arrives; run until nothing is left to say."""
        for _ in range(rounds):
            while self.under_way:
                self.hear(0)
            self.tick(1.0)
        assert not self.under_way or all(not g.mail.waiting() for g in self.groups)


def chaos(net: Net, data: st.DataObject) -> None:
    """Some of what is under way is heard (twice, out of order) or lost; or time passes."""
    for _ in range(data.draw(st.integers(0, 6))):
        if not net.under_way:
            net.tick(data.draw(st.sampled_from([0.0, 0.03, 0.6])))
            continue
        index = data.draw(st.integers(0, len(net.under_way) - 1))
        fate = data.draw(st.sampled_from(["hear", "hear", "twice", "lose"]))
        if fate == "lose":
            net.under_way.pop(index)
            continue
        if fate == "twice":
            net.under_way.append(net.under_way[index])
        net.hear(index)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_message_arrives_once_and_in_order_whatever_is_lost(data: st.DataObject) -> None:
    net = Net(data.draw(st.sampled_from([[1, 1], [2, 1], [1, 1, 1]])))
    ranks = st.integers(0, len(net.host_of) - 1)
    sizes = st.sampled_from([0, 10, CHUNK, CHUNK + 1, 3500, 40_000])
    size_of = {tag: data.draw(sizes) for tag in range(3)}
    sent: dict[tuple[int, int, int], list[MailKey]] = defaultdict(list)
    wanted: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    calls: list[tuple[str, int, int, int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        src, dst, tag = data.draw(ranks), data.draw(ranks), data.draw(st.integers(0, 2))
        # Tag 2 is received from whomever, always, so that no receive is left without a message.
        calls += [("send", src, dst, tag), ("recv", ANY_RANK if tag == 2 else src, dst, tag)]
    for what, src, dst, tag in data.draw(st.permutations(calls)):
        if what == "send":
            sent[src, dst, tag].append(net.send(src, dst, tag, size_of[tag], data.draw(st.booleans())))
        else:
            wanted[src, dst, tag].append(net.receive(dst, src, tag, size_of[tag]))
        chaos(net, data)
    net.calm()
    assert not net.failed
    assert not net.errors
    for (src, dst, tag), keys in sent.items():
        if tag == 2:
            got = [net.got[one] for one in wanted[ANY_RANK, dst, tag]]
            assert [key for key in got if key.src == src] == keys
        else:
            assert [net.got[one] for one in wanted[src, dst, tag]] == keys
    for group in net.groups:
        assert not group.mail.waiting()
        assert not group.mail.owes
        assert group.mail.inbox.open_bytes == 0
        assert all(pair.early == 0 for pair in group.mail.inbox.pairs.values())
        assert all(pair.early == 0 for pair in group.mail.outbox.pairs.values())
    assert not net.open


def test_nothing_is_said_when_everything_has_been_said() -> None:
    net = Net([1, 1])
    net.receive(1, 0, 0, 10)
    net.send(0, 1, 0, 10)
    net.calm()
    assert all(group.mail.deadline == float("inf") for group in net.groups)
    assert not net.under_way


def test_a_message_that_nobody_receives_costs_one_question_in_a_while() -> None:
    net = Net([1, 1])
    net.send(0, 1, 0, 50_000)
    net.calm(3)
    said = 0
    for _ in range(400):
        net.tick(0.1)
        said += len(net.under_way)
        while net.under_way:
            net.hear(0)
    assert 10 <= said <= 30, "40 seconds, a question and an answer each"


def test_what_a_stranger_says_changes_nothing() -> None:
    net = Net([1, 1, 1])
    group, room = net.groups[1], net.rooms[1]
    header = ChunkHeader(GID, mail_seq(1, 1), Role.MAIL, 0, 0, 4, Digest(bytes(32)), address(0, "uint8"), 0)
    cases = {
        "the peer of another rank": (2, header),
        "a rank that is not in the group": (0, header._replace(part=9)),
        "for a rank of another machine": (0, header._replace(seq=mail_seq(2, 1))),
        "number 0": (0, header._replace(seq=mail_seq(1, 0))),
        "far ahead": (0, header._replace(seq=mail_seq(1, 1 << 20))),
        "the second chunk of a message that was not offered": (0, header._replace(index=1)),
        "more than a chunk": (0, header._replace(size=CHUNK + 1)),
    }
    for why, (source, one) in cases.items():
        assert not room.accepts(group, PeerId(f"{source:016x}"), one), why
    assert room.accepts(group, PeerId(f"{0:016x}"), header)


def test_damage_is_repaired_twice_and_then_named() -> None:
    net = Net([1, 1])
    net.receive(1, 0, 0, 10)
    net.send(0, 1, 0, 10)
    for _ in range(3):
        places = [i for i, (_, _, what) in enumerate(net.under_way) if isinstance(what, ChunkHeader)]
        source, _, header = net.under_way.pop(places[0])
        out: list[Effect] = []
        net.rooms[1].rejected(net.groups[1], PeerId(f"{source:016x}"), header, net.now, out)
        net.carry_out(1, out)
        while any(to == 0 for _, to, _ in net.under_way):
            net.hear(next(i for i, (_, to, _) in enumerate(net.under_way) if to == 0))
    assert (
        "IntegrityError: chunks of message 1 from rank 0 to rank 1 arrived damaged 3 times" in net.errors[1]
    )
    assert "machine m0 (rank 0)" in net.errors[1]


# ------------------------------------------------------------------ small parts
def test_the_mailbox_matches_in_the_order_of_calls() -> None:
    box = Mailbox()

    def letter(src: int, tag: int, n: int) -> Letter:
        return Letter(MailKey(GID, src, 9, n), tag, "uint8", 4, 0.0, True)

    def receive(n: int, src: int, tag: int) -> Receiving:
        return Receiving(9, n, src, tag, "uint8", 4, 0.0)

    first, second, other = letter(1, 5, 1), letter(2, 5, 1), letter(1, 6, 2)
    assert [box.arrive(one) for one in (first, second, other)] == [None] * 3
    assert box.letters() == [first, second, other]
    assert box.post(receive(1, 2, 5)) is second
    assert box.post(receive(2, ANY_RANK, 5)) is first
    assert box.post(receive(3, ANY_RANK, 5)) is None
    assert box.post(receive(4, 1, 5)) is None
    assert box.waiting == 2
    met = [box.arrive(letter(1, 5, n)) for n in (3, 4)]
    assert [one.n for one in met if one is not None] == [3, 4], "the earlier call first"
    assert box.post(receive(5, 7, 1)) is None
    assert [one.n for one in box.drop_receives(7)] == [5]
    assert box.waiting == 0
    assert box.letters() == [other]


@given(st.integers(0, (1 << 16) - 1), st.integers(1, (1 << 40) - 1))
def test_names_in_chunk_headers(rank: int, n: int) -> None:
    seq = mail_seq(rank, n)
    assert 1 << 62 <= seq < 1 << 63, "beyond every collective"
    assert split_seq(seq) == (rank, n)


def test_dtypes_have_different_marks() -> None:
    from frogzmq.dtypes import DTYPES

    assert len({mark_of(name) for name in DTYPES}) == len(DTYPES)
    assert max(map(len, DTYPES)) <= DTYPE_CHARS
    for name in DTYPES:
        assert read_address(address(7, name)) == (7, name)
    assert read_address(bytes(8))[1] == "dtype #00000000"


@pytest.mark.parametrize("hosts", [[1, 1], [8, 8], [1] * 64, [64, 512]])
def test_unasked_messages_fit_into_the_room_for_them(hosts: list[int]) -> None:
    group = group_of(hosts, 0)
    for host, there in enumerate(hosts):
        room = early_room(group, host)
        assert room * there * (sum(hosts) - there) <= EARLY_BYTES
        assert 0 < room <= PAIR_BYTES
    assert early_room(group_of([1, 1], 0), 1) >= 32 * INLINE_BYTES
