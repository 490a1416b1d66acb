"""A tiny virtual network of peer tables: delays, loss, refused ports, crashes. Time is a number."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from frogzmq.machine import (
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
    Tick,
)
from frogzmq.proto.peers import PeerTable
from frogzmq.proto.settings import CoreSettings
from frogzmq.types import PeerId
from frogzmq.wire.messages import Identity, Message


def identity(number: int, name: str, instance: str = "1", endpoints: list[str] | None = None) -> Identity:
    """A peer whose one address is ``tcp://10.0.0.<number>:7000``."""
    listening = [f"tcp://10.0.0.{number}:7000"] if endpoints is None else endpoints
    pubs = [endpoint.replace(":7000", ":7001") for endpoint in listening] + ["tcp://127.0.0.1:7001"]
    return Identity(
        peer=f"{number:016x}", instance=instance, name=name, endpoints=listening, pub_endpoints=pubs,
        local_endpoint="tcp://127.0.0.1:7000", netns=f"net{number}",
    )  # fmt: skip


class Node:
    """One running peer table and what it told the rest of its core."""

    def __init__(self, net: Network, who: Identity, settings: CoreSettings) -> None:
        self.net, self.who = net, who
        self.table = PeerTable(who, settings, Random(f"{who.peer}/{who.instance}"))
        self.links: dict[str, Node | None] = {}
        self.notices: list[PeerUp | PeerDown] = []
        self.dials = 0
        self.alive = True
        self.paused = False
        self.inbox: list[Event] = []

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Dial():
                    self.dials += 1
                    self.links[effect.endpoint] = None
                    self.net.connect(self, effect.endpoint)
                case Hangup():
                    self.links.pop(effect.endpoint, None)
                case SendLink():
                    self.net.on_link(self, effect.endpoint, effect.message)
                case Reply():
                    self.net.on_route(self, effect.route, effect.message)
                case PeerUp() | PeerDown():
                    self.notices.append(effect)
                case _:
                    pass
        self.table.check()

    def event(self, event: Event) -> None:
        if self.paused:
            self.inbox.append(event)
        elif self.alive:
            self.take(self.table.handle(event, self.net.now))

    def resume(self) -> None:
        self.paused = False
        waiting, self.inbox = self.inbox, []
        for event in waiting:
            self.event(event)

    def downs(self) -> list[str]:
        return [notice.reason for notice in self.notices if isinstance(notice, PeerDown)]

    def ups(self) -> list[int]:
        return [notice.epoch for notice in self.notices if isinstance(notice, PeerUp)]


class Network:
    """Connects dialled endpoints to whoever listens there; the transport reconnects by itself."""

    def __init__(self, seed: int = 1, delay_s: float = 0.01, loss: float = 0.0) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.delay_s, self.loss = delay_s, loss
        self.listening: dict[str, Node] = {}
        self.holes: set[str] = set()
        """Endpoints that swallow every packet."""
        self.silent: set[frozenset[str]] = set()
        """Pairs of node names between which nothing moves, with connections left open."""
        self.nodes: list[Node] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def start(self, who: Identity, settings: CoreSettings | None = None) -> Node:
        node = Node(self, who, settings or CoreSettings())
        self.nodes.append(node)
        for endpoint in who.endpoints:
            self.listening[endpoint] = node
        return node

    def kill(self, node: Node) -> None:
        """The process dies: its connections close at once, its port refuses."""
        node.alive = False
        self.nodes.remove(node)
        for endpoint in [e for e, owner in self.listening.items() if owner is node]:
            del self.listening[endpoint]
        for other in self.nodes:
            for endpoint, far in other.links.items():
                if far is node:
                    other.links[endpoint] = None
                    self.later(other, LinkDown(endpoint, "connection lost"))
                    self.connect(other, endpoint, again=True)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._count), action))

    def later(self, node: Node, event: Event) -> None:
        self.after(self.delay_s * self.rng.uniform(0.8, 1.2), lambda: node.event(event))

    def connect(self, node: Node, endpoint: str, again: bool = False) -> None:
        def attempt() -> None:
            if not node.alive or node.links.get(endpoint, node) is not None:
                return
            far = self.listening.get(endpoint)
            if endpoint in self.holes:
                self.after(0.2, attempt)
            elif far is not None:
                node.links[endpoint] = far
                node.event(LinkUp(endpoint))
            else:
                if not again:
                    node.event(LinkDown(endpoint, "connection refused"))
                self.after(0.2, attempt)

        self.after(2 * self.delay_s, attempt)

    def _moves(self, a: Node, b: Node, message: Message) -> bool:
        # Hello and Welcome go over TCP as everything does; loss here stands for a stalled connection.
        return frozenset((a.who.name, b.who.name)) not in self.silent and self.rng.random() >= self.loss

    def on_link(self, node: Node, endpoint: str, message: Message) -> None:
        far = node.links.get(endpoint)
        if far is None or not self._moves(node, far, message):
            return
        route = f"{self.nodes.index(node)}|{node.who.instance}|{endpoint}".encode()
        self.later(far, Received(PeerId(node.who.peer), node.who.instance, route, message))

    def on_route(self, node: Node, route: bytes, message: Message) -> None:
        _, instance, endpoint = route.decode().split("|")
        for caller in self.nodes:
            if caller.who.instance == instance and caller.links.get(endpoint) is node:
                if self._moves(node, caller, message):
                    self.later(caller, LinkReceived(endpoint, message))
                return

    def run(self, until: float) -> None:
        while True:
            awake = [node for node in self.nodes if node.alive and not node.paused]
            first = min([node.table.deadline for node in awake] + [self._heap[0][0] if self._heap else until])
            if first >= until:
                self.now = until
                return
            self.now = max(self.now, first)
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            for node in awake:
                if node.alive and node.table.deadline <= self.now:
                    node.event(Tick())
