"""Who the other peers are, whether they live, and by which link they are reached.

Every peer owns one link (a dialled connection) to each other peer and sends on it; answers to Hello and
Ping come back on the same link. A peer is *up* from a Welcome on our link to it until that link is closed
for longer than a moment, or nothing at all has been heard of it for long. ``PeerUp`` and ``PeerDown`` tell
the rest of the core; each PeerUp has a new epoch, because what was under way before it may be lost.

Liveness counts anything heard, on either connection: bulk may keep a Pong waiting, and a way that is
blocked in one direction only is noticed by the transport, which then reports the link as down.
"""

from __future__ import annotations

from random import Random

from frogzmq.errors import VersionMismatch
from frogzmq.machine import (
    Attach,
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
)
from frogzmq.proto.dialler import Dialler
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


class PeerTable:
    """The machine described above. ``fatal`` is a text once this peer must stop: its identity is taken."""

    def __init__(self, me: Identity, settings: CoreSettings, rng: Random) -> None:
        self.me, self.settings = me, settings
        self.fatal: str | None = None
        self._d = Dialler(me, settings, rng)

    # ------------------------------------------------------------------ interface
    @property
    def deadline(self) -> float:
        """When to send the next ``Tick``; infinity while idle."""
        return self._d.deadline

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; events that do not concern peers only let time pass."""
        self._d.excuse(now)
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
        return self._d.finish(now)

    def learn(self, who: Identity, now: float) -> list[Effect]:
        """A job told of a peer: reach it. Ends in ``PeerUp`` or, within ``reach_timeout_s``, ``PeerDown``."""
        if who.peer == self.me.peer:
            if who.instance != self.me.instance:
                self._d.out.append(PeerDown(PeerId(who.peer), duplicate_text(self.me, who)))
            return self._d.finish(now)
        contact = self._d.ensure(who)
        if contact is None:
            self._d.out.append(PeerDown(PeerId(who.peer), self._d.full_text()))
        elif contact.state in ATTACHED:
            if who.instance != contact.who.instance:
                self._challenge(contact, who, b"", now)
        elif contact.state == State.DOWN or who.instance != contact.who.instance:
            contact.who = who
            self._d.start(contact, now)
        return self._d.finish(now)

    def seed(self, endpoint: str, now: float, key: str = "") -> list[Effect]:
        """A configured address: dial it for ever, whoever answers there. ``key``: encrypt to its holder."""
        if endpoint not in self._d.seeds and len(self._d.seeds) < self.settings.max_peers:
            seed = self._d.seeds[endpoint] = Seed(endpoint, key)
            seed.deadline = now
            self._d.changed.append(seed)
        return self._d.finish(now)

    def forget(self, peer: PeerId) -> list[Effect]:
        """Nobody needs ``peer`` any more: hang up. A peer that the configuration names is kept."""
        contact = self._d.contacts.get(peer)
        if contact is not None and not contact.seeds:
            self._d.hang_up(contact)
            del self._d.contacts[peer]
        return self._d.take()

    def heard(self, peer: PeerId, now: float, nbytes: int = 0) -> None:
        """Something arrived from ``peer`` (``nbytes`` of chunks): it lives."""
        contact = self._d.contacts.get(peer)
        if contact is not None:
            contact.called_at = now
            if nbytes:
                contact.received.add(nbytes, now)
            self._d.sign_of_life(contact, now)
            self._d.arm(contact)

    def sent(self, peer: PeerId, nbytes: int, now: float) -> None:
        """Chunk bytes were taken by ``peer``: for rates."""
        contact = self._d.contacts.get(peer)
        if contact is not None:
            contact.sent.add(nbytes, now)

    def mismatch(self, where: str, theirs: int, now: float) -> list[Effect]:
        """Another protocol version was met at ``where`` (an endpoint that we dialled, or a peer id)."""
        owner = self._d.owner(where) or self._d.known(PeerId(where))
        name = called(owner.who) if isinstance(owner, Contact) else f"the peer at {where}"
        self._refused(owner, str(VersionMismatch(PROTOCOL, theirs, name)), now)
        return self._d.finish(now)

    def is_up(self, peer: PeerId) -> bool:
        """Whether ``peer`` can be sent to now."""
        contact = self._d.contacts.get(peer)
        return contact is not None and contact.state in REACHABLE

    def who(self, peer: PeerId) -> Identity | None:
        """The latest identity of ``peer``."""
        if peer == self.me.peer:
            return self.me
        contact = self._d.contacts.get(peer)
        return contact.who if contact is not None else None

    def epoch(self, peer: PeerId) -> int:
        """Number of the present connection to ``peer``; 0 if there was never one."""
        contact = self._d.contacts.get(peer)
        return contact.epoch if contact is not None else 0

    def rtt(self, peer: PeerId) -> float | None:
        """Smoothed round-trip time in seconds."""
        contact = self._d.contacts.get(peer)
        return contact.rtt.smoothed if contact is not None and contact.rtt.smoothed >= 0 else None

    def snapshot(self, now: float) -> list[dict[str, object]]:
        """One row per peer, then one per configured address that nobody has answered at."""
        rows = [contact.row(now) for contact in self._d.contacts.values()]
        return rows + [seed.row() for seed in self._d.seeds.values() if seed.peer is None]

    def check(self) -> None:
        """Assert what must always hold; for tests and the simulator."""
        assert len(self._d.contacts) <= self.settings.max_peers
        for endpoint, owner in self._d.links.items():
            assert owner.endpoint == endpoint
        for peer, contact in self._d.contacts.items():
            assert contact.peer == peer
            assert not contact.endpoint or self._d.links[contact.endpoint] is contact
            assert contact.state not in ATTACHED or contact.endpoint
            assert len(contact.pings) <= MAX_PINGS
            assert self._d.due(contact) >= contact.armed

    # ----------------------------------------------------------------- our links
    def _on_link_up(self, endpoint: str, now: float) -> None:
        owner = self._d.owner(endpoint)
        if owner is None:
            return
        owner.connected = True
        if isinstance(owner, Contact) and owner.state in ATTACHED:
            owner.greeting = True
            if owner.state == State.LOST:
                owner.deadline = max(owner.deadline, now + self.settings.hello_timeout_s)
        self._greet(endpoint)

    def _greet(self, endpoint: str) -> None:
        self._d.out.append(SendLink(endpoint, Hello(who=self.me)))

    def _on_link_down(self, endpoint: str, reason: str, now: float) -> None:
        owner = self._d.owner(endpoint)
        if isinstance(owner, Seed):
            self._d.seed_failed(owner, reason, now)
        elif owner is not None and owner.state in REACHABLE:
            owner.state, owner.connected, owner.reason = State.LOST, False, reason
            owner.deadline = now + self.settings.lost_after_s
            owner.pings.clear()
            if owner.challenger is not None:
                self._d.take_over(owner, owner.challenger, now)
        elif owner is not None and owner.state == State.LOST:
            owner.connected = False
            if "refused" in reason.lower():
                self._d.closed(owner, now)
        elif owner is not None:
            self._d.candidate_failed(owner, reason, now)

    def _on_link_received(self, endpoint: str, message: Message, now: float) -> None:
        owner = self._d.owner(endpoint)
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
                self._d.sign_of_life(owner, now)
            case _:
                pass

    def _on_welcome(self, owner: Contact | Seed, who: Identity, now: float) -> None:
        endpoint = owner.endpoint
        if who.peer == self.me.peer:
            self._met_self(owner, who, now)
        elif isinstance(owner, Contact) and who.peer == owner.peer:
            self._welcomed(owner, who, now)
        elif endpoint in self._d.seeds:
            seed = self._d.seeds[endpoint]
            if isinstance(owner, Seed):
                self._adopt(seed, who, now)
            else:  # the machine at a configured address is another one now: begin with it afresh
                owner.seeds.pop(endpoint, None)
                self._lose(owner, f"its address {endpoint} is answered by {called(who)} now", now)
                seed.peer, seed.deadline = None, now
                self._d.changed.append(seed)
        elif isinstance(owner, Contact):
            self._lose(owner, f"answered by {called(who)}, not by {called(owner.who)}", now)

    def _met_self(self, owner: Contact | Seed, who: Identity, now: float) -> None:
        own = who.instance == self.me.instance
        text = "that is this peer itself" if own else duplicate_text(self.me, who)
        if isinstance(owner, Contact):
            self._lose(owner, text, now)
        else:
            self._d.seed_failed(owner, text, now)
            owner.own = own

    def _lose(self, contact: Contact, why: str, now: float) -> None:
        """The link of ``contact`` turned out not to lead to it."""
        if contact.state in ATTACHED:
            self._d.down(contact, f"peer {called(contact.who)}: {why}", now)
        else:
            self._d.candidate_failed(contact, why, now)

    def _adopt(self, seed: Seed, who: Identity, now: float) -> None:
        """Somebody answered at a configured address: hand the link to its contact."""
        contact = self._d.ensure(who)
        if contact is None:
            self._d.seed_failed(seed, self._d.full_text(), now)
            return
        seed.peer, seed.error, seed.failures, seed.dialled = PeerId(who.peer), "", 0, False
        contact.seeds[seed.endpoint] = seed.key
        if contact.state in REACHABLE:  # a second address of a peer that we have: one link is enough
            del self._d.links[seed.endpoint]
            self._d.out.append(Hangup(seed.endpoint))
            return
        self._d.hang_up(contact)
        contact.endpoint, contact.connected = seed.endpoint, True
        self._d.links[seed.endpoint] = contact
        self._welcomed(contact, who, now)

    def _welcomed(self, contact: Contact, who: Identity, now: float) -> None:
        restarted = who.instance != contact.who.instance
        if contact.state in ATTACHED and restarted:
            self._d.out.append(PeerDown(contact.peer, self._d.restarted_text(contact.who)))
        challenger, contact.challenger = contact.challenger, None
        if challenger is not None and challenger.route:
            same = who.instance == challenger.who.instance
            text = duplicate_text(who, challenger.who)
            answer = Welcome(who=self.me) if same else Refuse(code="DuplicateIdentity", text=text)
            self._d.out.append(Reply(challenger.route, answer))
        if contact.state in REACHABLE and not restarted and not contact.greeting:
            contact.who = who
            self._d.sign_of_life(contact, now)
            return
        contact.who = who
        contact.state, contact.connected, contact.greeting = State.UP, True, False
        contact.reason, contact.rounds, contact.resting = "", 0, False
        contact.heard_at = contact.ping_at = now
        contact.pings.clear()
        contact.tried.clear()
        self._d.epochs += 1
        contact.epoch = self._d.epochs
        self._d.out.append(Attach(contact.peer, contact.endpoint, contact.pub_endpoint(contact.endpoint)))
        self._d.out.append(PeerUp(contact.peer, contact.epoch))

    def _refused(self, owner: Contact | Seed | None, text: str, now: float) -> None:
        if isinstance(owner, Seed):
            self._d.seed_failed(owner, text, now)
        elif owner is not None:
            if owner.state != State.DOWN:
                if owner.endpoint:
                    owner.tried[owner.endpoint] = text
                self._d.down(owner, f"peer {called(owner.who)}: {text}", now)
            elif owner.endpoint:
                self._d.candidate_failed(owner, text, now)

    # -------------------------------------------------------- connections to us
    def _on_received(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._on_hello(event, message.who, now)
            return
        contact = self._d.known(event.peer)
        if contact is None:
            return
        if event.instance != contact.who.instance:
            # Of a former instance; or the present one is the challenger and has not been let in yet.
            if isinstance(message, Ping) and contact.state in REACHABLE and contact.challenger is None:
                text = superseded_text(contact.who)
                self._d.out.append(Reply(event.route, Refuse(code="DuplicateIdentity", text=text)))
            return
        contact.called_at = now
        if isinstance(message, Bye):
            if contact.state != State.DOWN:
                self._d.down(contact, f"peer {called(contact.who)} stopped: {message.reason}", now)
            self._d.hang_up(contact)
            contact.resting = not contact.seeds
            return
        if isinstance(message, Ping):
            self._d.out.append(Reply(event.route, Pong(nonce=message.nonce, sent=message.sent)))
        self._d.sign_of_life(contact, now)

    def _on_hello(self, event: Received, who: Identity, now: float) -> None:
        if who.peer != event.peer:
            text = f"this connection belongs to {event.peer}, but its Hello says {who.peer}"
            self._d.out.append(Reply(event.route, Refuse(code="WireError", text=text)))
            return
        if who.peer == self.me.peer:
            self._on_own_name(event, who)
            return
        contact = self._d.known(event.peer)
        if contact is None:
            contact = self._d.ensure(who)
            if contact is None:
                self._d.out.append(
                    Reply(event.route, Refuse(code="PeerUnreachable", text=self._d.full_text()))
                )
                return
            self._let_in(contact, who, event.route, now)
            self._d.start(contact, now)
        elif who.instance == contact.who.instance:
            self._let_in(contact, who, event.route, now)
            if contact.state == State.DOWN:
                contact.resting = False
                if not contact.endpoint:
                    contact.deadline = now
        elif contact.state in REACHABLE:
            self._challenge(contact, who, event.route, now)
        else:
            self._d.take_over(contact, Challenger(who, event.route, now), now)

    def _on_own_name(self, event: Received, who: Identity) -> None:
        if who.instance == self.me.instance:  # a loop to ourselves: the link's other end finds out
            self._d.out.append(Reply(event.route, Welcome(who=self.me)))
        elif who.instance > self.me.instance:
            text = duplicate_text(self.me, who)
            self._d.out.append(Reply(event.route, Refuse(code="DuplicateIdentity", text=text)))
        else:
            # Instances begin with the time of their start, so this peer is the newcomer: it goes,
            # whoever of the two found the other, and must not make the older one go too.
            self.fatal = self.fatal or duplicate_text(who, self.me)
            self._d.out.append(Reply(event.route, Refuse(code="PeerUnreachable", text="this peer stops")))

    def _let_in(self, contact: Contact, who: Identity, route: bytes, now: float) -> None:
        contact.who = who
        contact.called_at = now
        self._d.out.append(Reply(route, Welcome(who=self.me)))
        self._d.sign_of_life(contact, now)

    def _challenge(self, contact: Contact, who: Identity, route: bytes, now: float) -> None:
        """A newcomer has the identity of a living peer: ask whoever is at the end of our link who it is."""
        current = contact.challenger
        if contact.state == State.LOST:
            self._d.take_over(contact, Challenger(who, route, now), now)
        elif current is None:
            contact.challenger = Challenger(who, route, now + self.settings.probe_timeout_s)
            # Hello, not Ping: the transport may already have reconnected to the newcomer itself.
            self._greet(contact.endpoint)
        elif current.who.instance == who.instance:
            current.route = route or current.route
        elif route:
            text = duplicate_text(current.who, who)
            self._d.out.append(Reply(route, Refuse(code="DuplicateIdentity", text=text)))
