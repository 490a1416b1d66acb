"""Text scripts that drive peer cores by hand; what happens is recorded in the script itself.

A line that begins with ``>`` is a command, ``#`` a comment; every other line is recorded output. What peers
tell each other about a group waits in a queue per direction until the script delivers, drops or damages
it; greetings and pings pass by themselves while a path is open. Digests stand for bytes. Commands::

    set chunk_bytes=1024 ...        settings of peers made afterwards
    peers A B                       make them (one machine each)
    group G A:0,1 B:2 [mode=shard]  all ranks join and hear of each other
    join G A:0 B:1 / A:0            the same, but only A's rank joins, and nothing is delivered
    post 0,1 all_reduce SUM float32 [8] [root=0] [ready=16]
    post 0,1 all_gather float32 [8] splits=3,5
    ready 0 1 32                    rank 0 has written 32 bytes of op 1
    send 0->1 40 [tag=3] [dtype=int8] [withhold]   rank 0 sends 40 bytes, or gives them only when asked
    recv 1<-0 40 [tag=3]            rank 1 receives (``1<-any``: from whomever)
    deliver A->B [n] / drop A->B [n] / damage A->B / queue
    settle                          deliver everything until nothing is left
    leave 1 [clean] reason...       a rank goes
    kill B / start B                a machine goes; it is back, as a new instance
    cut A-B / heal A-B              a path swallows everything
    advance 2s                      time passes
    explain A 1 / state A           what a machine says
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from frogzmq.descriptor import Descriptor
from frogzmq.machine import (
    ChunkReceived,
    ChunkRejected,
    CloseGroup,
    CloseOp,
    Deliver,
    Dial,
    Effect,
    Event,
    Fail,
    Fold,
    Folded,
    FoldSolo,
    Joined,
    LinkDown,
    LinkReceived,
    LinkUp,
    MakePart,
    Note,
    OpenOp,
    PartMade,
    PeerDown,
    PeerUp,
    RankConsumed,
    RankJoined,
    RankLeft,
    RankPosted,
    RankReady,
    Received,
    Reply,
    Send,
    SendChunk,
    SendLink,
    Tick,
)
from frogzmq.mailing import (
    ANY_RANK,
    AskBytes,
    CloseMail,
    DeliverMail,
    FailMail,
    FailReceive,
    MailKey,
    MailMade,
    MailPosted,
    MailReady,
    MailTaken,
    MakeMail,
    OpenMail,
    ReceivePosted,
)
from frogzmq.proto.peer import PeerCore
from frogzmq.proto.settings import CoreSettings
from frogzmq.types import ConnId, Digest, GroupId, OpKind, PeerId, ReduceOp, Role
from frogzmq.wire.limits import INLINE_BYTES
from frogzmq.wire.mail import split_seq
from frogzmq.wire.messages import ChunkHeader, Credit, GroupOptions, Identity, JoinGroup, Member, Message

MAX_STEPS = 100_000


def hashed(*what: object) -> Digest:
    return Digest(hashlib.sha256(repr(what).encode()).digest())


class Machine:
    """One peer core and its wires."""

    def __init__(self, name: str, number: int, settings: CoreSettings, start: int = 1) -> None:
        self.number, self.start = number, start
        self.name, self.endpoint, self.alive = name, f"tcp://{name}:1", True
        self.id = PeerId(f"{number:016x}")
        self.who = Identity(peer=self.id, instance=f"{name}{start}", name=name, endpoints=[self.endpoint])
        self.core = PeerCore(self.who, settings, Random(name))


class Script:
    """The world of one script."""

    def __init__(self) -> None:
        self.now = 0.0
        self.settings = CoreSettings()
        self.machines: dict[str, Machine] = {}
        self.queues: dict[tuple[str, str], deque[Message | ChunkHeader]] = {}
        self.cut: set[frozenset[str]] = set()
        self.swallowed: list[tuple[Machine, Machine]] = []
        self.join: JoinGroup | None = None
        self.home: dict[int, Machine] = {}
        self.next_seq: dict[int, int] = {}
        self.lines: list[str] = []
        self.pending: deque[tuple[Machine, Event]] = deque()
        self.mail_count: dict[tuple[int, int], int] = {}
        self.withheld: dict[MailKey, int] = {}

    # -------------------------------------------------------------------- driving
    def run(self, text: str) -> str:
        """Carry out every command; return the script with fresh output."""
        kept: list[str] = []
        for line in text.splitlines():
            if line.startswith(">"):
                kept.append(line)
                self.lines = []
                word, *words = line[1:].split()
                command: Callable[..., None] = getattr(self, f"do_{word}")
                command(*words)
                self._drain()
                kept += [f"  {row}" for row in self.lines]
            elif not line.strip() or line.startswith("#"):
                kept.append(line)
        return "\n".join(kept) + "\n"

    def _event(self, machine: Machine, event: Event) -> None:
        self.pending.append((machine, event))

    def _drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.pending:
                return
            machine, event = self.pending.popleft()
            if machine.alive:
                effects = machine.core.handle(event, self.now)
                machine.core.check()
                machine.core.peers.check()
                for effect in effects:
                    self._effect(machine, effect)
        raise AssertionError("the machines never come to rest")

    def _at(self, endpoint: str) -> Machine:
        return next(m for m in self.machines.values() if m.endpoint == endpoint)

    def _name(self, peer: str) -> str:
        return next(m.name for m in self.machines.values() if m.id == peer)

    def _open(self, a: Machine, b: Machine) -> bool:
        return a.alive and b.alive and frozenset((a.name, b.name)) not in self.cut

    # -------------------------------------------------------------------- effects
    def _effect(self, m: Machine, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case Dial():
                there = self._at(effect.endpoint)
                if self._open(m, there):
                    self._event(m, LinkUp(effect.endpoint))
                elif there.alive:
                    self.swallowed.append((m, there))
                else:
                    self._event(m, LinkDown(effect.endpoint, "connection refused"))
            case SendLink():
                there = self._at(effect.endpoint)
                if self._open(m, there):
                    event = Received(m.id, m.who.instance, m.name.encode(), effect.message)
                    self._event(there, event)
            case Reply():
                back = self.machines[effect.route.decode()]
                if self._open(m, back):
                    self._event(back, LinkReceived(m.endpoint, effect.message))
            case Send():
                self._enqueue(m, effect.peer, effect.message)
            case SendChunk():
                self._enqueue(m, effect.peer, effect.header)
            case MakePart():
                digest = hashed(effect.gid, effect.seq, effect.part, effect.span) if effect.leaves else None
                self._say(m, effect)
                self._event(m, PartMade(effect.gid, effect.seq, effect.part, effect.span, digest))
            case Fold():
                digest = hashed(effect.gid, effect.seq, "result", effect.piece) if effect.leaves else None
                self._say(m, effect)
                self._event(m, Folded(effect.gid, effect.seq, effect.piece, digest))
            case MakeMail():
                digest = hashed(effect.key, effect.index)
                self._event(m, MailMade(effect.key, effect.index, digest))
            case AskBytes():
                self._say(m, effect)
                self._event(m, MailReady(effect.key, self.withheld[effect.key]))
            case DeliverMail():
                self._say(m, effect)
                if effect.upto == effect.size and not effect.inline:
                    self._event(m, MailTaken(effect.key.gid, effect.key.dst, effect.n))
            case Deliver():
                self._say(m, effect)
                if effect.final and effect.upto > INLINE_BYTES:
                    self._event(m, RankConsumed(effect.gid, effect.rank, effect.seq))
            case _:
                self._say(m, effect)

    def _enqueue(self, m: Machine, peer: PeerId, what: Message | ChunkHeader) -> None:
        there = self.machines[self._name(peer)]
        if not isinstance(what, Credit):
            self.lines.append(f"{m.name}->{there.name} {self._text(what)}")
        if self._open(m, there):
            self.queues.setdefault((m.name, there.name), deque()).append(what)

    def _text(self, what: Message | ChunkHeader) -> str:
        if isinstance(what, ChunkHeader) and what.role == Role.MAIL:
            dst, n = split_seq(what.seq)
            return f"chunk: message {n} from {what.part} to {dst}, chunk {what.index}, {what.size} bytes"
        if isinstance(what, ChunkHeader):
            piece = f"part {what.part} span" if what.role == Role.PART else "result piece"
            return f"chunk: op {what.seq} {piece} {what.index}, {what.size} bytes, done {what.done}"
        fields = what.model_dump(exclude={"gid", "members", "options", "root", "observed"})
        if not fields.get("mail", True):
            del fields["mail"]
        return f"{type(what).__name__} " + " ".join(f"{k}={v}" for k, v in fields.items())

    def _say(self, m: Machine, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case OpenOp():
                plan = effect.plan
                text = (
                    f"op {effect.seq} opens: {plan.descriptor.describe()}, {plan.mode}, {plan.pieces} pieces"
                )
            case MakePart():
                text = f"op {effect.seq}: make part {effect.part} span {effect.span}"
            case Fold():
                text = f"op {effect.seq}: fold piece {effect.piece}"
            case FoldSolo():
                text = f"op {effect.seq}: {effect.plan.descriptor.describe()} folded for all ranks at once"
            case Deliver(upto=-1):
                text = f"rank {effect.rank}: op {effect.seq} done, no data"
            case Deliver():
                final = "done" if effect.final else "grows"
                text = f"rank {effect.rank}: op {effect.seq} {final}, {effect.upto} bytes"
            case CloseOp():
                text = f"op {effect.seq} closes"
            case Joined():
                text = f"rank {effect.rank} joined"
            case Note():
                text = f"rank {effect.rank} note: {effect.text}"
            case Fail():
                text = f"rank {effect.rank} fails from op {effect.seq}: {effect.code}: {effect.text}"
            case CloseGroup():
                text = "group closes"
            case AskBytes(key):
                text = f"rank {key.src}: give message {key.n} to {key.dst}"
            case OpenMail(key):
                text = f"room for message {key.n} from {key.src} to {key.dst}, {effect.size} bytes"
            case DeliverMail(key):
                part = f"{effect.upto} of {effect.size} bytes from {key.src}"
                text = f"rank {key.dst}: receive {effect.n} has {part}"
            case CloseMail(key):
                text = f"message {key.n} from {key.src} to {key.dst} is over"
            case FailReceive():
                text = f"rank {effect.rank}: receive {effect.n} fails: {effect.code}: {effect.text}"
            case FailMail(key):
                text = f"rank {key.src}: message {key.n} to {key.dst} fails: {effect.code}: {effect.text}"
            case PeerUp():
                text = f"{self._name(effect.peer)} is up, epoch {effect.epoch}"
            case PeerDown():
                text = f"{self._name(effect.peer)} is down: {effect.reason}"
            case _:
                return  # Attach, Hangup, Publish: nothing that a script waits for
        self.lines.append(f"{m.name} {text}")

    # ------------------------------------------------------------------- commands
    def do_set(self, *pairs: str) -> None:
        changes = {key: float(value) for key, value in (pair.split("=") for pair in pairs)}
        whole = {key: int(value) if value.is_integer() else value for key, value in changes.items()}
        self.settings = replace(self.settings, **whole)

    def do_peers(self, *names: str) -> None:
        for name in names:
            self.machines[name] = Machine(name, len(self.machines) + 1, self.settings)

    def do_join(self, name: str, *words: str) -> None:
        places = [word for word in words if ":" in word]
        if "/" in words:
            places = list(words[: words.index("/")])
        options = dict(word.split("=") for word in words if "=" in word)
        members: list[Member] = []
        for place in places:
            machine, ranks = place.split(":")
            who = self.machines[machine].who
            for rank in map(int, ranks.split(",")):
                self.home[rank] = self.machines[machine]
                members.append(Member(rank=rank, pid=1000 + rank, host=machine, who=who))
        gid = hashed(name)[:16].hex()
        if self.join is None or self.join.gid != gid:
            self.next_seq = {}
        self.join = JoinGroup(
            gid=gid, job="script", name=name, rank=0, size=len(members), timeout_s=60.0,
            options=GroupOptions(**options), members=members,
        )  # fmt: skip
        joining = words[words.index("/") + 1 :] if "/" in words else places
        for place in joining:
            for rank in map(int, place.split(":")[1].split(",")):
                self.next_seq.setdefault(rank, 1)
                mine = self.join.model_copy(update={"rank": rank})
                self._event(self.home[rank], RankJoined(ConnId(rank), mine))
        self._drain()

    def do_group(self, name: str, *words: str) -> None:
        self.do_join(name, *words)
        self.do_settle()
        self.lines = [line for line in self.lines if "GroupReady" not in line]

    @property
    def gid(self) -> GroupId:
        assert self.join is not None, "no group yet"
        return GroupId(bytes.fromhex(self.join.gid))

    def do_post(self, ranks: str, kind: str, *words: str) -> None:
        options = dict(word.split("=") for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        reduce = ReduceOp[plain.pop(0)] if plain and plain[0] in ReduceOp.__members__ else ReduceOp.NONE
        dtype = plain.pop(0) if plain else "uint8"
        shape = tuple(int(n) for n in "".join(plain).strip("[]").split(",") if n) if plain else (0,)
        splits = tuple(int(n) for n in options.get("splits", "").split(",") if n)
        called = Descriptor(OpKind[kind.upper()], reduce, dtype, shape, int(options.get("root", -1)), splits)
        for rank in map(int, ranks.split(",")):
            seq = self.next_seq[rank]
            self.next_seq[rank] += 1
            assert self.join is not None, "no group yet"
            ready = int(options.get("ready", called.gives(rank, self.join.size)))
            self._event(self.home[rank], RankPosted(self.gid, rank, seq, called, ready))
            self._drain()

    def do_send(self, path: str, size: str, *words: str) -> None:
        options = dict(word.split("=") for word in words if "=" in word)
        src, dst = map(int, path.split("->"))
        n = self.mail_count[src, dst] = self.mail_count.get((src, dst), 0) + 1
        key = MailKey(self.gid, src, dst, n)
        self.withheld[key] = int(size)
        given, dtype = "withhold" not in words, options.get("dtype", "uint8")
        self._event(self.home[src], MailPosted(key, int(options.get("tag", 0)), dtype, int(size), given))

    def do_recv(self, path: str, size: str, *words: str) -> None:
        options = dict(word.split("=") for word in words if "=" in word)
        rank, source = path.split("<-")
        dst, src = int(rank), ANY_RANK if source == "any" else int(source)
        n = self.mail_count[dst, ANY_RANK] = self.mail_count.get((dst, ANY_RANK), 0) + 1
        tag, dtype = int(options.get("tag", 0)), options.get("dtype", "uint8")
        self._event(self.home[dst], ReceivePosted(self.gid, dst, n, src, tag, dtype, int(size)))

    def do_ready(self, rank: str, seq: str, nbytes: str) -> None:
        self._event(self.home[int(rank)], RankReady(self.gid, int(rank), int(seq), int(nbytes)))

    def _pull(self, path: str, count: str) -> list[Message | ChunkHeader]:
        queue = self.queues.get(tuple(path.split("->")), deque())  # type: ignore[arg-type]
        return [queue.popleft() for _ in range(min(int(count), len(queue)))]

    def _hand_over(self, path: str, what: Message | ChunkHeader) -> None:
        source, target = (self.machines[name] for name in path.split("->"))
        if isinstance(what, ChunkHeader):
            self._event(target, ChunkReceived(source.id, what))
        else:
            self._event(target, Received(source.id, source.who.instance, b"", what))
        self._drain()

    def do_deliver(self, path: str, count: str = "1000") -> None:
        for what in self._pull(path, count):
            self._hand_over(path, what)

    def do_drop(self, path: str, count: str = "1000") -> None:
        for what in self._pull(path, count):
            self.lines.append(f"{path} lost: {self._text(what)}")

    def do_damage(self, path: str) -> None:
        for what in self._pull(path, "1"):
            assert isinstance(what, ChunkHeader), "only chunks can be damaged"
            target = self.machines[path.split("->")[1]]
            self._event(target, ChunkRejected(self.machines[path.split("->", maxsplit=1)[0]].id, what))

    def do_queue(self) -> None:
        for (a, b), queue in sorted(self.queues.items()):
            self.lines += [f"{a}->{b} waiting: {self._text(what)}" for what in queue]

    def do_settle(self) -> None:
        self._drain()
        for _ in range(MAX_STEPS):
            waiting = sorted(path for path, queue in self.queues.items() if queue)
            if not waiting:
                return
            self.do_deliver("->".join(waiting[0]), "1")
        raise AssertionError("the machines never fall silent")

    def do_leave(self, rank: str, *words: str) -> None:
        clean = bool(words) and words[0] == "clean"
        reason = " ".join(words[1:] if clean else words)
        self._event(self.home[int(rank)], RankLeft(self.gid, int(rank), clean, reason))

    def do_kill(self, name: str) -> None:
        dead = self.machines[name]
        dead.alive = False
        for path in [path for path in self.queues if name in path]:
            del self.queues[path]
        for machine in self.machines.values():
            self._event(machine, LinkDown(dead.endpoint, "connection closed"))

    def do_start(self, name: str) -> None:
        old = self.machines[name]
        self.machines[name] = Machine(name, old.number, self.settings, old.start + 1)
        for machine in self.machines.values():  # whoever still has a link: its transport reconnects
            if machine.name != name:
                self._event(machine, LinkUp(old.endpoint))

    def do_cut(self, pair: str) -> None:
        a, b = pair.split("-")
        self.cut.add(frozenset((a, b)))
        self.queues.pop((a, b), None)
        self.queues.pop((b, a), None)

    def do_heal(self, pair: str) -> None:
        self.cut.discard(frozenset(pair.split("-")))
        dials, self.swallowed = self.swallowed, []
        for machine, there in dials:
            if self._open(machine, there):
                self._event(machine, LinkUp(there.endpoint))

    def do_advance(self, duration: str) -> None:
        until = self.now + float(duration.rstrip("s"))
        for _ in range(MAX_STEPS):
            living = [machine for machine in self.machines.values() if machine.alive]
            first = min(living, key=lambda machine: machine.core.deadline)
            if first.core.deadline > until:
                self.now = until
                return
            self.now = max(self.now, first.core.deadline)
            self._event(first, Tick())
            self._drain()
        raise AssertionError("time does not pass")

    def do_explain(self, name: str, seq: str) -> None:
        self.lines.append(f"{name} {self.machines[name].core.explain(self.gid, int(seq), self.now)}")

    def do_state(self, name: str) -> None:
        shot = self.machines[name].core.snapshot(self.now)
        self.lines += [f"{name} peer {row['name']}: {row['state']}" for row in shot["peers"]]
        for group in shot["groups"]:
            self.lines.append(f"{name} group {group['name']}: {group['state']}, {group['ops_done']} ops done")
            for op in group["ops"]:
                done = "complete" if op["complete"] else f"missing ranks {op['missing']}"
                self.lines.append(f"{name} op {op['seq']} {op['what']}: {done}")
            for row in group["mail"]["waiting"]:
                what = f"{row['what']} of rank {row['rank']}, other rank {row['peer_rank']}, tag {row['tag']}"
                self.lines.append(f"{name} {what}, {row['bytes']} bytes, since {row['age_s']:g} s")


def check_script(path: Path, *, rewrite: bool) -> tuple[str, str]:
    """(recorded, fresh) text of a script; with ``rewrite`` the file is brought up to date first."""
    recorded = path.read_text(encoding="utf-8")
    fresh = Script().run(recorded)
    if rewrite and fresh != recorded:
        path.write_text(fresh, encoding="utf-8")
        recorded = fresh
    return recorded, fresh
