"""Who the other peers are, whether they live, and by which link they are reached.

Every peer owns one link (a dialled connection) to each other peer and sends on it; answers to Hello and
Ping come back on the same link. A peer is *up* from a Welcome on our link to it until that link is closed
for longer than a moment, or nothing at all has been heard of it for long. ``PeerUp`` and ``PeerDown`` tell
the rest of the core; each PeerUp has a new epoch, because what was under way before it may be lost.

Liveness counts anything heard, on either connection: bulk may keep a Pong waiting, and a way that is
blocked in one direction only is noticed by the transport, which then reports the link as down.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from random import Random

from frogzmq.errors import VersionMismatch
from frogzmq.machine import (
    Attach,
    Dial,
    Effect,
    Event,
    Hangup,
    LinkDown,
    LinkReceived,
    LinkUp,
    PeerDown,
    PeerUp,
    Received,
    Reply,
    SendLink,
)
from frogzmq.proto.contact import (
    ATTACHED,
    MAX_PINGS,
    REACHABLE,
    Challenger,
    Contact,
    Seed,
    State,
    called,
    duplicate_text,
    superseded_text,
    unreachable_text,
)
from frogzmq.proto.settings import CoreSettings
from frogzmq.types import PeerId
from frogzmq.wire.messages import (
    PROTOCOL,
    Bye,
    Hello,
    Identity,
    Message,
    Ping,
    Pong,
    Refuse,
    Welcome,
)

ASLEEP_S = 1.0
"""Woken this much later than asked, this process itself was stopped: the others are not to blame."""
EAGER_REDIAL_S = 0.25
EAGER_REDIAL_MAX_S = 2.0
"""Pauses between rounds while somebody waits to reach a peer."""
MAX_PATIENCE = 4
"""``hello_timeout_s`` is multiplied by the number of the round, up to this."""


class PeerTable:
    """The machine described above. ``fatal`` is a text once this peer must stop: its identity is not its own."""

    def __init__(self, me: Identity, settings: CoreSettings, rng: Random) -> None:
        self.me, self.settings = me, settings
        self.fatal: str | None = None
        self._rng = rng
        self._contacts: dict[PeerId, Contact] = {}
        self._seeds: dict[str, Seed] = {}
        self._links: dict[str, Contact | Seed] = {}
        self._timers: list[tuple[float, int, Contact | Seed]] = []
        self._count = self._epochs = self._nonce = 0
        self._out: list[Effect] = []

    # ------------------------------------------------------------------ interface
    @property
    def deadline(self) -> float:
        """When to send the next ``Tick``; infinity while idle."""
        return self._timers[0][0] if self._timers else math.inf

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; events that do not concern peers only let time pass."""
        self._excuse(now)
        match event:
            case LinkUp():
                self._on_link_up(event.endpoint, now)
            case LinkDown():
                self._on_link_down(event.endpoint, event.reason, now)
            case LinkReceived():
                self._on_link_received(event.endpoint, event.message, now)
            case Received():
                self._on_received(event, now)
            case _:
                pass
        return self._finish(now)

    def learn(self, who: Identity, now: float) -> list[Effect]:
        """A job told of a peer: reach it. Ends in ``PeerUp`` or, within ``reach_timeout_s``, ``PeerDown``."""
        if who.peer == self.me.peer:
            if who.instance != self.me.instance:
                self._out.append(PeerDown(PeerId(who.peer), duplicate_text(self.me, who)))
            return self._finish(now)
        contact = self._ensure(who)
        if contact is None:
            self._out.append(PeerDown(PeerId(who.peer), self._full_text()))
        elif contact.state in ATTACHED:
            if who.instance != contact.who.instance:
                self._challenge(contact, who, b"", now)
        elif contact.state == State.DOWN or who.instance != contact.who.instance or not contact.since:
            contact.who = who
            self._start(contact, now)
        return self._finish(now)

    def seed(self, endpoint: str, now: float, key: str = "") -> list[Effect]:
        """A configured address: dial it for ever, whoever answers there. ``key``: encrypt to its holder."""
        if endpoint not in self._seeds and len(self._seeds) < self.settings.max_peers:
            seed = self._seeds[endpoint] = Seed(endpoint, key)
            seed.deadline = now
            self._arm(seed)
        return self._finish(now)

    def forget(self, peer: PeerId) -> list[Effect]:
        """Nobody needs ``peer`` any more: hang up. A peer that the configuration names is kept."""
        contact = self._contacts.get(peer)
        if contact is not None and not contact.seeds:
            self._hang_up(contact)
            del self._contacts[peer]
        out, self._out = self._out, []
        return out

    def heard(self, peer: PeerId, now: float, nbytes: int = 0) -> None:
        """Something arrived from ``peer`` (``nbytes`` of chunks): it lives."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.called_at = now
            if nbytes:
                contact.received.add(nbytes, now)
            self._sign_of_life(contact, now)

    def sent(self, peer: PeerId, nbytes: int, now: float) -> None:
        """Chunk bytes were taken by ``peer``: for rates."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.sent.add(nbytes, now)

    def mismatch(self, where: str, theirs: int, now: float) -> list[Effect]:
        """Another protocol version was met at ``where`` (an endpoint that we dialled, or a peer id)."""
        owner = self._links.get(where) or self._contacts.get(PeerId(where))
        name = called(owner.who) if isinstance(owner, Contact) else f"the peer at {where}"
        self._refused(owner, str(VersionMismatch(PROTOCOL, theirs, name)), now)
        return self._finish(now)

    def is_up(self, peer: PeerId) -> bool:
        """Whether ``peer`` can be sent to now."""
        contact = self._contacts.get(peer)
        return contact is not None and contact.state in REACHABLE

    def who(self, peer: PeerId) -> Identity | None:
        """The latest identity of ``peer``."""
        if peer == self.me.peer:
            return self.me
        contact = self._contacts.get(peer)
        return contact.who if contact is not None else None

    def epoch(self, peer: PeerId) -> int:
        """Number of the present connection to ``peer``; 0 if there was never one."""
        contact = self._contacts.get(peer)
        return contact.epoch if contact is not None else 0

    def rtt(self, peer: PeerId) -> float | None:
        """Smoothed round-trip time in seconds."""
        contact = self._contacts.get(peer)
        return contact.rtt.smoothed if contact is not None and contact.rtt.smoothed >= 0 else None

    def snapshot(self, now: float) -> list[dict[str, object]]:
        """One row per peer, then one per configured address that nobody has answered at."""
        rows = [contact.row(now) for contact in self._contacts.values()]
        return rows + [seed.row() for seed in self._seeds.values() if seed.peer is None]

    def check(self) -> None:
        """Assert what must always hold; for tests and the simulator."""
        assert len(self._contacts) <= self.settings.max_peers
        for endpoint, owner in self._links.items():
            assert owner.endpoint == endpoint
        for peer, contact in self._contacts.items():
            assert contact.peer == peer
            assert not contact.endpoint or self._links[contact.endpoint] is contact
            assert contact.state not in ATTACHED or contact.endpoint
            assert len(contact.pings) <= MAX_PINGS
            assert self._due(contact) >= contact.armed

    # ----------------------------------------------------------------- our links
    def _on_link_up(self, endpoint: str, now: float) -> None:
        owner = self._links.get(endpoint)
        if owner is None:
            return
        owner.connected = True
        if isinstance(owner, Contact) and owner.state in ATTACHED:
            owner.greeting = True
            if owner.state == State.LOST:
                owner.deadline = max(owner.deadline, now + self.settings.hello_timeout_s)
        self._greet(endpoint)

    def _greet(self, endpoint: str) -> None:
        self._out.append(SendLink(endpoint, Hello(who=self.me)))

    def _on_link_down(self, endpoint: str, reason: str, now: float) -> None:
        owner = self._links.get(endpoint)
        if isinstance(owner, Seed):
            self._seed_failed(owner, reason, now)
        elif owner is not None and owner.state in REACHABLE:
            owner.state, owner.connected, owner.reason = State.LOST, False, reason
            owner.deadline = now + self.settings.lost_after_s
            owner.pings.clear()
            if owner.challenger is not None:
                self._take_over(owner, owner.challenger, now)
        elif owner is not None and owner.state == State.LOST:
            owner.connected = False
            if "refused" in reason.lower():
                self._closed(owner, now)
        elif owner is not None:
            self._candidate_failed(owner, reason, now)

    def _on_link_received(self, endpoint: str, message: Message, now: float) -> None:
        owner = self._links.get(endpoint)
        if owner is None:
            return
        match message:
            case Welcome():
                self._on_welcome(owner, message.who, now)
            case Refuse():
                if message.code == "DuplicateIdentity":
                    self.fatal = self.fatal or message.text
                self._refused(owner, f"refused us: {message.text}", now)
            case Pong() if isinstance(owner, Contact):
                sent = owner.pings.pop(message.nonce, None)
                if sent is not None:
                    owner.rtt.sample(now - sent)
                self._sign_of_life(owner, now)
            case _:
                pass

    def _on_welcome(self, owner: Contact | Seed, who: Identity, now: float) -> None:
        endpoint = owner.endpoint
        if who.peer == self.me.peer:
            self._met_self(owner, who, now)
        elif isinstance(owner, Contact) and who.peer == owner.peer:
            self._welcomed(owner, who, now)
        elif endpoint in self._seeds:
            if isinstance(owner, Contact):  # the machine at a configured address is another one now
                del owner.seeds[endpoint]
                self._lose(owner, f"its address {endpoint} is answered by {called(who)} now", now)
            self._adopt(self._seeds[endpoint], who, now)
        elif isinstance(owner, Contact):
            self._lose(owner, f"answered by {called(who)}, not by {called(owner.who)}", now)

    def _met_self(self, owner: Contact | Seed, who: Identity, now: float) -> None:
        own = who.instance == self.me.instance
        text = "that is this peer itself" if own else duplicate_text(self.me, who)
        if isinstance(owner, Contact):
            self._lose(owner, text, now)
        else:
            self._seed_failed(owner, text, now)
            owner.own = own

    def _lose(self, contact: Contact, why: str, now: float) -> None:
        """The link of ``contact`` turned out not to lead to it."""
        if contact.state in ATTACHED:
            self._down(contact, f"peer {called(contact.who)}: {why}", now)
        else:
            self._candidate_failed(contact, why, now)

    def _adopt(self, seed: Seed, who: Identity, now: float) -> None:
        """Somebody answered at a configured address: hand the link to its contact."""
        contact = self._ensure(who)
        if contact is None:
            self._seed_failed(seed, self._full_text(), now)
            return
        seed.peer, seed.error, seed.failures, seed.dialled = PeerId(who.peer), "", 0, False
        contact.seeds[seed.endpoint] = seed.key
        mine = self._links.pop(seed.endpoint, None) is seed
        if contact.state in REACHABLE:  # a second address of a peer that we have: one link is enough
            if mine:
                self._out.append(Hangup(seed.endpoint))
            return
        self._hang_up(contact)
        if not mine:
            self._out.append(Dial(seed.endpoint, seed.key))
        contact.endpoint, contact.connected = seed.endpoint, mine
        self._links[seed.endpoint] = contact
        self._welcomed(contact, who, now)

    def _welcomed(self, contact: Contact, who: Identity, now: float) -> None:
        challenger, contact.challenger = contact.challenger, None
        if challenger is not None and challenger.route:
            same = who.instance == challenger.who.instance
            text = duplicate_text(who, challenger.who)
            answer = Welcome(who=self.me) if same else Refuse(code="DuplicateIdentity", text=text)
            self._out.append(Reply(challenger.route, answer))
        restarted = who.instance != contact.who.instance
        if contact.state in REACHABLE and not restarted and not contact.greeting:
            contact.who = who
            self._sign_of_life(contact, now)
            return
        if contact.state in ATTACHED and restarted:
            self._out.append(PeerDown(contact.peer, self._restarted_text(contact.who)))
        contact.who = who
        contact.state, contact.connected, contact.greeting = State.UP, True, False
        contact.reason, contact.rounds, contact.resting = "", 0, False
        contact.heard_at = contact.ping_at = now
        contact.pings.clear()
        contact.tried.clear()
        self._epochs += 1
        contact.epoch = self._epochs
        self._out.append(Attach(contact.peer, contact.endpoint, contact.pub_endpoint(contact.endpoint)))
        self._out.append(PeerUp(contact.peer, contact.epoch))

    def _refused(self, owner: Contact | Seed | None, text: str, now: float) -> None:
        if isinstance(owner, Seed):
            self._seed_failed(owner, text, now)
        elif owner is not None:
            if owner.endpoint:
                owner.tried[owner.endpoint] = text
            if owner.state != State.DOWN:
                self._down(owner, f"peer {called(owner.who)}: {text}", now)
            else:
                self._candidate_failed(owner, text, now)

    # -------------------------------------------------------- connections to us
    def _on_received(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event, message.who, now)
            return
        contact = self._contacts.get(event.peer)
        if contact is None:
            return
        if event.instance != contact.who.instance:
            # Of a former instance; or the present one is the challenger and has not been let in yet.
            if isinstance(message, Ping) and contact.state in REACHABLE and contact.challenger is None:
                text = superseded_text(contact.who)
                self._out.append(Reply(event.route, Refuse(code="DuplicateIdentity", text=text)))
            return
        contact.called_at = now
        if isinstance(message, Bye):
            if contact.state != State.DOWN:
                self._down(contact, f"peer {called(contact.who)} stopped: {message.reason}", now)
            self._hang_up(contact)
            contact.resting = not contact.seeds
            return
        if isinstance(message, Ping):
            self._out.append(Reply(event.route, Pong(nonce=message.nonce, sent=message.sent)))
        self._sign_of_life(contact, now)

    def _on_hello(self, event: Received, who: Identity, now: float) -> None:
        if who.peer != event.peer:
            text = f"this connection belongs to {event.peer}, but its Hello says {who.peer}"
            self._out.append(Reply(event.route, Refuse(code="WireError", text=text)))
            return
        if who.peer == self.me.peer:
            self._on_own_name(event, who)
            return
        contact = self._contacts.get(event.peer)
        if contact is None:
            contact = self._ensure(who)
            if contact is None:
                self._out.append(Reply(event.route, Refuse(code="PeerUnreachable", text=self._full_text())))
                return
            self._let_in(contact, who, event.route, now)
            self._start(contact, now)
        elif who.instance == contact.who.instance:
            self._let_in(contact, who, event.route, now)
            if contact.state == State.DOWN:
                contact.resting = False
                if not contact.endpoint:
                    contact.deadline = now
        elif contact.state in REACHABLE:
            self._challenge(contact, who, event.route, now)
        else:
            self._take_over(contact, Challenger(who, event.route, now), now)

    def _on_own_name(self, event: Received, who: Identity) -> None:
        if who.instance == self.me.instance:  # a loop to ourselves: the link's other end finds out
            self._out.append(Reply(event.route, Welcome(who=self.me)))
        elif who.instance > self.me.instance:
            text = duplicate_text(self.me, who)
            self._out.append(Reply(event.route, Refuse(code="DuplicateIdentity", text=text)))
        else:
            # Instances begin with the time of their start, so this peer is the newcomer: it goes,
            # whoever of the two found the other, and must not make the older one go too.
            self.fatal = self.fatal or duplicate_text(who, self.me)
            self._out.append(Reply(event.route, Refuse(code="PeerUnreachable", text="this peer stops")))

    def _let_in(self, contact: Contact, who: Identity, route: bytes, now: float) -> None:
        contact.who = who
        contact.called_at = now
        self._out.append(Reply(route, Welcome(who=self.me)))
        self._sign_of_life(contact, now)

    def _challenge(self, contact: Contact, who: Identity, route: bytes, now: float) -> None:
        """A newcomer has the identity of a living peer: ask whoever is at the end of our link who it is."""
        current = contact.challenger
        if contact.state == State.LOST:
            self._take_over(contact, Challenger(who, route, now), now)
        elif current is None:
            contact.challenger = Challenger(who, route, now + self.settings.probe_timeout_s)
            # Hello, not Ping: the transport may already have reconnected to the newcomer itself.
            self._greet(contact.endpoint)
        elif current.who.instance == who.instance:
            current.route = route or current.route
        elif route:
            text = duplicate_text(current.who, who)
            self._out.append(Reply(route, Refuse(code="DuplicateIdentity", text=text)))

    def _take_over(self, contact: Contact, challenger: Challenger, now: float) -> None:
        """The former instance is gone: ``challenger`` is this peer from now on."""
        if contact.state in ATTACHED:
            self._out.append(PeerDown(contact.peer, self._restarted_text(contact.who)))
        contact.who, contact.challenger = challenger.who, None
        if challenger.route:
            contact.called_at = now
            self._out.append(Reply(challenger.route, Welcome(who=self.me)))
        self._start(contact, now)

    # -------------------------------------------------------------------- dialling
    def _ensure(self, who: Identity) -> Contact | None:
        """The contact of ``who``; None where there is no room, not even that of a dead one."""
        peer = PeerId(who.peer)
        contact = self._contacts.get(peer)
        if contact is None:
            if len(self._contacts) >= self.settings.max_peers and not self._evict():
                return None
            contact = self._contacts[peer] = Contact(who)
        return contact

    def _evict(self) -> bool:
        dead = [c for c in self._contacts.values() if c.state == State.DOWN and not c.seeds]
        if not dead:
            return False
        oldest = min(dead, key=lambda contact: contact.since)
        self._hang_up(oldest)
        del self._contacts[oldest.peer]
        return True

    def _full_text(self) -> str:
        return f"{self.me.name} knows {self.settings.max_peers} peers already, which is its limit"

    @staticmethod
    def _restarted_text(old: Identity) -> str:
        return f"peer {called(old)} restarted: its instance {old.instance} is gone, with what it held"

    def _start(self, contact: Contact, now: float) -> None:
        """Begin to reach a peer from scratch."""
        self._hang_up(contact)
        contact.state, contact.since, contact.rounds, contact.resting = State.DIALLING, now, 0, False
        contact.greeting = False
        contact.tried.clear()
        self._round(contact, now)

    def _round(self, contact: Contact, now: float) -> None:
        contact.queue = [endpoint for endpoint, _ in contact.candidates(self.me)]
        contact.round_at = now
        if not contact.queue and contact.state == State.DIALLING:
            self._down(contact, unreachable_text(contact, self.me, now), now)
        else:
            self._next_candidate(contact, now)

    def _next_candidate(self, contact: Contact, now: float) -> None:
        keys = dict(contact.candidates(self.me))
        while contact.queue:
            endpoint = contact.queue.pop(0)
            other = self._links.get(endpoint)
            if other is not None or endpoint not in keys:
                contact.tried[endpoint] = "in use for " + (
                    called(other.who) if isinstance(other, Contact) else "a configured peer"
                )
                continue
            contact.endpoint, contact.connected = endpoint, False
            patience = min(contact.rounds + 1, MAX_PATIENCE)
            contact.deadline = now + self.settings.hello_timeout_s * patience
            self._links[endpoint] = contact
            self._out.append(Dial(endpoint, keys[endpoint]))
            return
        if contact.state == State.DIALLING:
            pause = self._pause(contact.rounds, EAGER_REDIAL_S, EAGER_REDIAL_MAX_S)
        else:
            pause = self._pause(contact.rounds, self.settings.redial_min_s, self.settings.redial_max_s)
        contact.rounds += 1
        contact.deadline = now + pause

    def _pause(self, rounds: int, first: float, longest: float) -> float:
        """Exponential back-off with jitter, so that many peers do not dial in step."""
        return min(longest, first * float(2 ** min(rounds, 16))) * self._rng.uniform(0.8, 1.0)

    def _candidate_failed(self, contact: Contact, why: str, now: float) -> None:
        contact.tried[contact.endpoint] = why
        self._hang_up(contact)
        self._next_candidate(contact, now)

    def _hang_up(self, contact: Contact) -> None:
        if contact.endpoint:
            del self._links[contact.endpoint]
            self._out.append(Hangup(contact.endpoint))
        contact.endpoint, contact.connected, contact.greeting = "", False, False
        contact.pings.clear()

    def _closed(self, contact: Contact, now: float) -> None:
        text = (
            f"peer {called(contact.who)}: connection to {contact.endpoint} closed ({contact.reason}) "
            f"and not back in {self.settings.lost_after_s:g} s; its process or machine has stopped, "
            "or the network between is down"
        )
        self._down(contact, text, now)

    def _down(self, contact: Contact, reason: str, now: float) -> None:
        """Tell once that a peer is gone, and dial it again later."""
        challenger, contact.challenger = contact.challenger, None
        self._hang_up(contact)
        contact.state, contact.reason, contact.since, contact.rounds = State.DOWN, reason, now, 0
        contact.deadline = now + self._pause(0, self.settings.redial_min_s, self.settings.redial_max_s)
        self._out.append(PeerDown(contact.peer, reason))
        if challenger is not None:
            self._take_over(contact, challenger, now)

    def _seed_failed(self, seed: Seed, why: str, now: float) -> None:
        if seed.dialled:
            del self._links[seed.endpoint]
            self._out.append(Hangup(seed.endpoint))
        seed.dialled, seed.connected, seed.error = False, False, why
        seed.deadline = now + self._pause(
            seed.failures, self.settings.redial_min_s, self.settings.redial_max_s
        )
        seed.failures += 1

    # ------------------------------------------------------------------------ time
    def _sign_of_life(self, contact: Contact, now: float) -> None:
        contact.heard_at = now
        if contact.state == State.SLOW:
            contact.state = State.UP
        elif contact.state == State.DOWN and not contact.endpoint and not contact.resting:
            # It lives after all. Not at every sign: the way from here to there may be the broken one.
            soon = max(now, contact.round_at + 2 * self.settings.hello_timeout_s)
            contact.deadline = min(contact.deadline, soon)
            self._arm(contact)

    def _excuse(self, now: float) -> None:
        """If this process was stopped for a while, nobody could be heard: give the time back."""
        late = now - self.deadline
        if late <= ASLEEP_S or late == math.inf:
            return
        for contact in self._contacts.values():
            contact.heard_at += late
            contact.deadline += late
            if contact.state == State.DIALLING:
                contact.since += late
            if contact.challenger is not None:
                contact.challenger.deadline += late
        for seed in self._seeds.values():
            if seed.dialled:
                seed.deadline += late

    def _due(self, item: Contact | Seed) -> float:
        if isinstance(item, Seed):
            return math.inf if item.own or item.peer is not None else item.deadline
        if item.state in REACHABLE:
            settings = self.settings
            patience = settings.slow_after_s if item.state == State.UP else settings.silent_dead_after_s
            probe = item.challenger.deadline if item.challenger is not None else math.inf
            return min(item.ping_at, item.heard_at + patience, probe)
        if item.state == State.DIALLING:
            return min(item.deadline, item.since + self.settings.reach_timeout_s)
        return math.inf if item.resting else item.deadline

    def _arm(self, item: Contact | Seed) -> None:
        due = self._due(item)
        if due < item.armed:
            item.armed = due
            self._count += 1
            heappush(self._timers, (due, self._count, item))

    def _finish(self, now: float) -> list[Effect]:
        """Let everything happen whose time has come, and hand out the effects."""
        touched: dict[int, Contact | Seed] = {}
        while self._timers and self._timers[0][0] <= now:
            when, _, item = heappop(self._timers)
            if when == item.armed:
                item.armed = math.inf
                touched[id(item)] = item
        for item in touched.values():
            if self._due(item) <= now:
                if isinstance(item, Seed):
                    self._on_seed_time(item, now)
                elif self._contacts.get(item.peer) is item:
                    self._on_time(item, now)
        self._rearm(touched)
        out, self._out = self._out, []
        return out
