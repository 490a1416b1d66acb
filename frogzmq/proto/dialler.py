"""Keeping a link to every peer that is wanted: dialling, waiting, giving up, coming back.

Owns the contacts, the configured addresses and the timers; ``proto.peers`` says what messages mean.
Addresses of one peer are tried in turn, best first, in rounds with growing pauses. Each wait has a
deadline in a heap; an item is armed for the earliest time at which anything may be due, and looked at anew
then, so that what is put off (a Pong came) costs nothing.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from random import Random

from frogzmq.machine import Dial, Effect, Hangup, PeerDown, Reply, SendLink
from frogzmq.proto.contact import (
    ATTACHED,
    MAX_PINGS,
    REACHABLE,
    Challenger,
    Contact,
    Seed,
    State,
    called,
    unreachable_text,
)
from frogzmq.proto.settings import CoreSettings
from frogzmq.types import PeerId
from frogzmq.wire.messages import Identity, Ping, Welcome

ASLEEP_S = 1.0
"""Woken this much later than asked, this process itself was stopped: the others are not to blame."""
EAGER_REDIAL_S = 0.25
EAGER_REDIAL_MAX_S = 2.0
"""Pauses between rounds while somebody waits to reach a peer."""
MAX_PATIENCE = 4
"""``hello_timeout_s`` is multiplied by the number of the round, up to this."""


class Dialler:
    """All contacts, seeds and links of one peer; methods append to ``out``, ``finish`` hands it out."""

    def __init__(self, me: Identity, settings: CoreSettings, rng: Random) -> None:
        self.me, self.settings = me, settings
        self.contacts: dict[PeerId, Contact] = {}
        self.seeds: dict[str, Seed] = {}
        self.links: dict[str, Contact | Seed] = {}
        """Who uses the link to an endpoint that is dialled or connected."""
        self.out: list[Effect] = []
        self.changed: list[Contact | Seed] = []
        """Looked up since the last ``finish``: their deadlines may have moved."""
        self.epochs = 0
        self._rng = rng
        self._timers: list[tuple[float, int, Contact | Seed]] = []
        self._count = self._nonce = 0

    @property
    def deadline(self) -> float:
        """When to call ``finish`` though nothing happened."""
        return self._timers[0][0] if self._timers else math.inf

    def owner(self, endpoint: str) -> Contact | Seed | None:
        """Who uses the link to ``endpoint``."""
        owner = self.links.get(endpoint)
        if owner is not None:
            self.changed.append(owner)
        return owner

    def known(self, peer: PeerId) -> Contact | None:
        """The contact of ``peer``, if there is one."""
        contact = self.contacts.get(peer)
        if contact is not None:
            self.changed.append(contact)
        return contact

    def ensure(self, who: Identity) -> Contact | None:
        """The contact of ``who``; None where there is no room, not even that of a dead one."""
        peer = PeerId(who.peer)
        contact = self.known(peer)
        if contact is None:
            if len(self.contacts) >= self.settings.max_peers and not self._evict():
                return None
            contact = self.contacts[peer] = Contact(who)
            self.changed.append(contact)
        return contact

    def _evict(self) -> bool:
        dead = [c for c in self.contacts.values() if c.state == State.DOWN and not c.seeds]
        if not dead:
            return False
        oldest = min(dead, key=lambda contact: contact.since)
        self.hang_up(oldest)
        del self.contacts[oldest.peer]
        return True

    def full_text(self) -> str:
        """Why one more peer was not taken in."""
        return f"{self.me.name} knows {self.settings.max_peers} peers already, which is its limit"

    @staticmethod
    def restarted_text(old: Identity) -> str:
        """What became of a former instance."""
        return f"peer {called(old)} restarted: its instance {old.instance} is gone, with what it held"

    def start(self, contact: Contact, now: float) -> None:
        """Begin to reach a peer from scratch."""
        self.hang_up(contact)
        contact.state, contact.since, contact.rounds, contact.resting = State.DIALLING, now, 0, False
        contact.greeting = False
        contact.tried.clear()
        self._round(contact, now)

    def _round(self, contact: Contact, now: float) -> None:
        contact.queue = [endpoint for endpoint, _ in contact.candidates(self.me)]
        contact.round_at = now
        if not contact.queue and contact.state == State.DIALLING:
            self.down(contact, unreachable_text(contact, self.me, now), now)
        else:
            self._next_candidate(contact, now)

    def _next_candidate(self, contact: Contact, now: float) -> None:
        keys = dict(contact.candidates(self.me))
        while contact.queue:
            endpoint = contact.queue.pop(0)
            other = self.links.get(endpoint)
            if other is not None or endpoint not in keys:
                contact.tried[endpoint] = "in use for " + (
                    called(other.who) if isinstance(other, Contact) else "a configured peer"
                )
                continue
            contact.endpoint, contact.connected = endpoint, False
            patience = min(contact.rounds + 1, MAX_PATIENCE)
            contact.deadline = now + self.settings.hello_timeout_s * patience
            self.links[endpoint] = contact
            self.out.append(Dial(endpoint, keys[endpoint]))
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

    def candidate_failed(self, contact: Contact, why: str, now: float) -> None:
        """The address being tried is no good: go on with the next."""
        contact.tried[contact.endpoint] = why
        self.hang_up(contact)
        self._next_candidate(contact, now)

    def hang_up(self, contact: Contact) -> None:
        """Close the link of a contact, if it has one."""
        if contact.endpoint:
            del self.links[contact.endpoint]
            self.out.append(Hangup(contact.endpoint))
        contact.endpoint, contact.connected, contact.greeting = "", False, False
        contact.pings.clear()

    def closed(self, contact: Contact, now: float) -> None:
        """A lost link has not come back."""
        text = (
            f"peer {called(contact.who)}: connection to {contact.endpoint} closed ({contact.reason}) "
            f"and not back in {self.settings.lost_after_s:g} s; its process or machine has stopped, "
            "or the network between is down"
        )
        self.down(contact, text, now)

    def down(self, contact: Contact, reason: str, now: float) -> None:
        """Tell once that a peer is gone, and dial it again later."""
        challenger, contact.challenger = contact.challenger, None
        self.hang_up(contact)
        contact.state, contact.reason, contact.since, contact.rounds = State.DOWN, reason, now, 0
        contact.deadline = now + self._pause(0, self.settings.redial_min_s, self.settings.redial_max_s)
        self.out.append(PeerDown(contact.peer, reason))
        if challenger is not None:
            self.take_over(contact, challenger, now)

    def seed_failed(self, seed: Seed, why: str, now: float) -> None:
        """Nobody (of use) answered at a configured address: try again later."""
        if seed.dialled:
            del self.links[seed.endpoint]
            self.out.append(Hangup(seed.endpoint))
        seed.dialled, seed.connected, seed.error, seed.peer = False, False, why, None
        seed.deadline = now + self._pause(
            seed.failures, self.settings.redial_min_s, self.settings.redial_max_s
        )
        seed.failures += 1

    def take_over(self, contact: Contact, challenger: Challenger, now: float) -> None:
        """The former instance is gone: ``challenger`` is this peer from now on."""
        if contact.state in ATTACHED:
            self.out.append(PeerDown(contact.peer, self.restarted_text(contact.who)))
        contact.who, contact.challenger = challenger.who, None
        if challenger.route:
            contact.called_at = now
            self.out.append(Reply(challenger.route, Welcome(who=self.me)))
        self.start(contact, now)

    # ------------------------------------------------------------------------ time
    def sign_of_life(self, contact: Contact, now: float) -> None:
        """Something was heard of a contact."""
        contact.heard_at = now
        if contact.state == State.SLOW:
            contact.state = State.UP
        elif contact.state == State.DOWN and not contact.endpoint and not contact.resting:
            # It lives after all. Not at every sign: the way from here to there may be the broken one.
            soon = max(now, contact.round_at + 2 * self.settings.hello_timeout_s)
            contact.deadline = min(contact.deadline, soon)

    def excuse(self, now: float) -> None:
        """If this process was stopped for a while, nobody could be heard: give the time back."""
        late = now - self.deadline
        if late <= ASLEEP_S or late == math.inf:
            return
        for contact in self.contacts.values():
            contact.heard_at += late
            contact.deadline += late
            if contact.state == State.DIALLING:
                contact.since += late
            if contact.challenger is not None:
                contact.challenger.deadline += late
        for seed in self.seeds.values():
            if seed.dialled:
                seed.deadline += late

    def due(self, item: Contact | Seed) -> float:
        """When anything may have to be done about it."""
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

    def arm(self, item: Contact | Seed) -> None:
        """See to it that it is looked at when due."""
        due = self.due(item)
        if due < item.armed:
            item.armed = due
            self._count += 1
            heappush(self._timers, (due, self._count, item))

    def _on_seed_time(self, seed: Seed, now: float) -> None:
        if seed.dialled:
            self.seed_failed(seed, self._silence_text(seed.connected), now)
        elif seed.endpoint in self.links:  # a contact has that address: wait for how that ends
            seed.deadline = now + self.settings.hello_timeout_s
        else:
            patience = min(seed.failures + 1, MAX_PATIENCE)
            seed.dialled, seed.deadline = True, now + self.settings.hello_timeout_s * patience
            self.links[seed.endpoint] = seed
            self.out.append(Dial(seed.endpoint, seed.key))

    def _on_time(self, contact: Contact, now: float) -> None:
        settings = self.settings
        if contact.state in REACHABLE:
            self._on_attached_time(contact, now)
        elif contact.state == State.LOST:
            self.closed(contact, now)
        elif contact.state == State.DIALLING and now >= contact.since + settings.reach_timeout_s:
            if contact.endpoint:
                contact.tried.setdefault(contact.endpoint, self._silence_text(contact.connected))
            self.down(contact, unreachable_text(contact, self.me, now), now)
        elif contact.endpoint:
            self.candidate_failed(contact, self._silence_text(contact.connected), now)
        elif self._given_up(contact, now):
            contact.deadline = math.inf
        else:
            self._round(contact, now)

    def _given_up(self, contact: Contact, now: float) -> bool:
        """Away for long, and no configuration names it; a sign of life still brings it back."""
        away_s = now - contact.since
        return contact.state == State.DOWN and not contact.seeds and away_s > self.settings.redial_for_s

    @staticmethod
    def _silence_text(connected: bool) -> str:
        return (
            "connected, but no answer to our Hello (a peer that is stopped, or no peer)"
            if connected
            else "no connection in time (packets are dropped on the way, or that address is not in use)"
        )

    def _on_attached_time(self, contact: Contact, now: float) -> None:
        settings = self.settings
        challenger = contact.challenger
        if challenger is not None and now >= challenger.deadline:
            self.take_over(contact, challenger, now)
            return
        silence = now - contact.heard_at
        if now >= contact.heard_at + settings.silent_dead_after_s:
            text = (
                f"peer {called(contact.who)} at {contact.endpoint}: nothing heard for {silence:.1f} s though "
                "the connection is open; its machine is stopped or the network between is down"
            )
            self.down(contact, text, now)
            return
        if now >= contact.heard_at + settings.slow_after_s:
            contact.state = State.SLOW
        if now >= contact.ping_at:
            self._nonce += 1
            while len(contact.pings) >= MAX_PINGS:
                del contact.pings[next(iter(contact.pings))]
            contact.pings[self._nonce] = now
            contact.ping_at = now + settings.ping_interval_s
            self.out.append(SendLink(contact.endpoint, Ping(nonce=self._nonce, sent=now)))

    def finish(self, now: float) -> list[Effect]:
        """Let everything happen whose time has come, and hand out the effects."""
        for item in self.changed:
            self.arm(item)
        self.changed.clear()
        while self._timers and self._timers[0][0] <= now:
            when, _, item = heappop(self._timers)
            if when != item.armed:
                continue  # armed anew for an earlier time, which has come and gone
            item.armed = math.inf
            if isinstance(item, Contact) and self.contacts.get(item.peer) is not item:
                continue  # forgotten
            self.changed.append(item)
            if self.due(item) > now:
                continue
            if isinstance(item, Seed):
                self._on_seed_time(item, now)
            else:
                self._on_time(item, now)
        for item in self.changed:
            self.arm(item)
        self.changed.clear()
        return self.take()

    def take(self) -> list[Effect]:
        """The effects so far."""
        out, self.out = self.out, []
        return out
