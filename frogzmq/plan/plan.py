"""The plan of one collective: a pure function of (descriptor, placement, options).

A collective's bytes are cut three ways:

* a **part** is what one machine (fold order ``machine``) or one rank (order ``rank``) contributes,
* a **span** is a piece of a part's bytes that travels as one chunk; all parts have the same spans,
* a **piece** is one span of the *result*. Its *sources* are the part chunks it is folded from, its
  *folders* the machines that fold it, and its *receivers* those that are handed the folded bytes.

``faithful``: every machine that needs a piece folds it. ``shard``: one owner folds and hands it out.
Broadcast is a fold of one source, all_gather a fold of one source per piece; so one machine carries out
every kind (``proto.op``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from frogzmq.descriptor import Descriptor
from frogzmq.types import Mode, OpKind, Order, PeerId

FOLDING = (OpKind.ALL_REDUCE, OpKind.REDUCE)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of the group and the ranks that live on it, ascending."""

    peer: PeerId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One unit of contribution: ``ranks`` are folded on ``host`` before it leaves."""

    index: int
    host: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start:stop`` of every part; ``owner`` (a host index) folds it in ``shard``."""

    index: int
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class Plan:
    """Everything that the machines of a group must agree on for one op (all indices are host indices)."""

    descriptor: Descriptor
    hosts: tuple[Host, ...]
    mode: Mode
    """``FAITHFUL`` or ``SHARD``; ``AUTO`` has been resolved."""
    order: Order
    parts: tuple[Part, ...]
    spans: tuple[Span, ...]

    @cached_property
    def size(self) -> int:
        """World size of the group."""
        return sum(len(host.ranks) for host in self.hosts)

    @cached_property
    def part_nbytes(self) -> int:
        """Bytes in one part."""
        return self.descriptor.nbytes

    @cached_property
    def gathers(self) -> bool:
        """Whether the result holds every part side by side."""
        return self.descriptor.kind == OpKind.ALL_GATHER

    @cached_property
    def result_nbytes(self) -> int:
        """Bytes in the result."""
        return self.part_nbytes * (len(self.parts) if self.gathers else 1)

    @cached_property
    def pieces(self) -> int:
        """How many pieces the result has (at least one, perhaps of no bytes)."""
        return len(self.spans) * (len(self.parts) if self.gathers else 1)

    @cached_property
    def root_host(self) -> int:
        """Host of the root rank, -1 where there is no root."""
        root = self.descriptor.root
        return next((i for i, host in enumerate(self.hosts) if root in host.ranks), -1)

    def piece_of(self, part: int, span: int) -> int:
        """The piece that part chunk (``part``, ``span``) goes into."""
        return part * len(self.spans) + span if self.gathers else span

    def bounds(self, piece: int) -> tuple[int, int]:
        """Where in the result the piece stands: byte offsets."""
        if self.gathers:
            part, index = divmod(piece, len(self.spans))
            base = part * self.part_nbytes
            return base + self.spans[index].start, base + self.spans[index].stop
        return self.spans[piece].start, self.spans[piece].stop

    def sources(self, piece: int) -> list[tuple[int, int]]:
        """Part chunks (part, span) in the order in which they are folded."""
        if self.gathers:
            return [divmod(piece, len(self.spans))]
        return [(part.index, piece) for part in self.parts]

    def needs(self, host: int) -> bool:
        """Whether the machine needs the result at all (for reduce only the root's does)."""
        return self.descriptor.kind != OpKind.REDUCE or host == self.root_host

    def folders(self, piece: int) -> tuple[int, ...]:
        """Machines that fold the piece themselves."""
        kind = self.descriptor.kind
        if self.mode == Mode.SHARD and not self.gathers:
            owner = self.spans[piece].owner
            if kind == OpKind.BROADCAST and owner != self.root_host:
                return (owner, self.root_host)
            return (owner,)
        if kind == OpKind.REDUCE:
            return (self.root_host,)
        return tuple(range(len(self.hosts)))

    def receivers(self, piece: int) -> tuple[int, ...]:
        """Machines that are handed the folded piece by its owner."""
        if self.mode != Mode.SHARD or self.gathers:
            return ()
        folders = self.folders(piece)
        return tuple(h for h in range(len(self.hosts)) if h not in folders and self.needs(h))

    def sender(self, piece: int) -> int:
        """The machine that hands the folded piece out: its owner."""
        return self.spans[piece].owner

    def part_targets(self, part: int, span: int) -> tuple[int, ...]:
        """Machines that the part chunk is pushed to."""
        origin = self.parts[part].host
        return tuple(h for h in self.folders(self.piece_of(part, span)) if h != origin)


def make_hosts(places: dict[int, PeerId]) -> tuple[Host, ...]:
    """Group ranks by machine; machines in the order of their lowest rank."""
    ranks: dict[PeerId, list[int]] = {}
    for rank in sorted(places):
        ranks.setdefault(places[rank], []).append(rank)
    return tuple(Host(peer, tuple(mine)) for peer, mine in ranks.items())
