"""The plan of one collective: a pure function of (descriptor, placement, options).

A collective's bytes are cut three ways:

* a **part** is what one machine (fold order ``machine``) or one rank (order ``rank``) contributes,
* a **span** is a piece of a part's bytes that travels as one chunk,
* a **piece** is one span of the *result*. Its *sources* are the part chunks it is folded from, its
  *folders* the machines that fold it, and its *receivers* those that are handed the folded bytes.

``faithful``: every machine that needs a piece folds it. ``shard``: one owner folds and hands it out.
Broadcast is a fold of one source, all_gather a fold of one source per piece; so one machine carries out
every kind (``proto.op``).

Where the result is more than one contribution, or not the same on all machines (gather, scatter,
reduce_scatter, all_to_all), a ``Layout`` says which piece stands where. A machine's result then holds the
intervals of its own ranks, one after the other, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from frogzmq.descriptor import Descriptor
from frogzmq.types import Mode, OpKind, Order, PeerId, Role

FOLDING = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER)
JOINED = (*FOLDING, OpKind.BARRIER)
"""Kinds in which a piece is made of the same span of every part."""


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
    """Bytes ``start:stop`` of a part; ``owner`` (a host index) folds it in ``shard``, or alone needs it."""

    index: int
    start: int
    stop: int
    owner: int


Spans = tuple[Span, ...]


class Piece(NamedTuple):
    """A piece in a ``Layout``: ``nbytes`` at offset ``at`` of the result on each of ``hosts``.

    It is made of chunk ``span`` of ``part``, or of all parts where that is -1.
    """

    at: int
    nbytes: int
    part: int
    span: int
    hosts: tuple[int, ...]


class Interval(NamedTuple):
    """What a rank reads: bytes ``start:stop`` of its machine's result, which are pieces ``first:last``."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """Which piece of which chunk stands where."""

    pieces: tuple[Piece, ...]
    number: tuple[tuple[int, ...], ...]
    """Part -> span -> piece."""
    intervals: dict[int, Interval]
    """By rank; ranks that get no data have none."""
    room: tuple[int, ...]
    """Bytes in each machine's result."""


@dataclass(frozen=True)
class Plan:
    """Everything that the machines of a group must agree on for one op (all indices are host indices)."""

    descriptor: Descriptor
    hosts: tuple[Host, ...]
    mode: Mode
    """``FAITHFUL`` or ``SHARD``; ``AUTO`` has been resolved."""
    order: Order
    parts: tuple[Part, ...]
    cuts: tuple[Spans, ...]
    """Each part's spans."""
    layout: Layout | None = None
    """None: the result has the shape and the spans of a contribution, the same for everyone."""
    turns: tuple[int, ...] = ()
    """Order ``gloo``: the ring's chunk that each span is in, which says who comes first (``plan.gloo``)."""

    @cached_property
    def size(self) -> int:
        """World size of the group."""
        return sum(len(host.ranks) for host in self.hosts)

    @cached_property
    def spans(self) -> Spans:
        """Spans of the first part: of every part, where all are cut alike."""
        return self.cuts[0]

    @cached_property
    def part_nbytes(self) -> tuple[int, ...]:
        """Bytes in each part."""
        return tuple(self.descriptor.gives(part.ranks[0], self.size) for part in self.parts)

    @cached_property
    def fan_in(self) -> int:
        """How many part chunks each piece is folded from."""
        return len(self.parts) if self.descriptor.kind in JOINED else 1

    @cached_property
    def pieces(self) -> int:
        """How many pieces all results have together (at least one, perhaps of no bytes)."""
        return len(self.layout.pieces) if self.layout is not None else len(self.spans)

    @cached_property
    def root_host(self) -> int:
        """Host of the root rank, -1 where there is no root."""
        root = self.descriptor.root
        return next((i for i, host in enumerate(self.hosts) if root in host.ranks), -1)

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """Bytes of other machines' part chunks that each machine receives."""
        totals = [0] * len(self.hosts)
        foreign = [sum(part.host != host for part in self.parts) for host in range(len(self.hosts))]
        for piece in range(self.pieces):
            start, stop = self.bounds(piece)
            for host in self.folders(piece):
                far = foreign[host]
                if self.fan_in != len(self.parts):
                    far = int(self.parts[self.sources(piece)[0][0]].host != host)
                totals[host] += (stop - start) * far
        return tuple(totals)

    def result_nbytes(self, host: int) -> int:
        """Bytes in the machine's result."""
        return self.layout.room[host] if self.layout is not None else self.descriptor.nbytes

    def interval(self, rank: int) -> Interval | None:
        """What the rank reads of its machine's result; None where it gets no data."""
        if self.layout is not None:
            return self.layout.intervals.get(rank)
        if self.descriptor.gets(rank, self.size) < 0:
            return None
        return Interval(0, self.descriptor.nbytes, 0, self.pieces)

    def piece_of(self, part: int, span: int) -> int:
        """The piece that part chunk (``part``, ``span``) goes into."""
        return self.layout.number[part][span] if self.layout is not None else span

    def bounds(self, piece: int) -> tuple[int, int]:
        """Where the piece stands in the result of each machine that needs it: byte offsets."""
        if self.layout is not None:
            row = self.layout.pieces[piece]
            return row.at, row.at + row.nbytes
        return self.spans[piece].start, self.spans[piece].stop

    def sources(self, piece: int) -> list[tuple[int, int]]:
        """Part chunks (part, span) in the order in which they are folded."""
        span = piece
        if self.layout is not None:
            row = self.layout.pieces[piece]
            if row.part >= 0:
                return [(row.part, row.span)]
            span = row.span
        if self.turns:
            first, world = self.turns[span] - 1, len(self.parts)
            return [((first - step) % world, span) for step in range(world)]
        return [(part.index, span) for part in self.parts]

    def needs(self, host: int) -> bool:
        """Whether the machine needs a result at all (for reduce and gather only the root's does)."""
        return self.descriptor.kind not in (OpKind.REDUCE, OpKind.GATHER) or host == self.root_host

    def folders(self, piece: int) -> tuple[int, ...]:
        """Machines that fold the piece themselves."""
        if self.layout is not None:
            return self.layout.pieces[piece].hosts
        kind = self.descriptor.kind
        if self.mode == Mode.SHARD:
            owner = self.spans[piece].owner
            if kind == OpKind.BROADCAST and owner != self.root_host:
                return (owner, self.root_host)
            return (owner,)
        if kind == OpKind.REDUCE:
            return (self.root_host,)
        return tuple(range(len(self.hosts)))

    def receivers(self, piece: int) -> tuple[int, ...]:
        """Machines that are handed the folded piece by its owner."""
        if self.mode != Mode.SHARD or self.layout is not None:
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

    def due(self, host: int, role: int, part: int, index: int) -> bool:
        """Whether the machine can have use for a chunk, whoever sends it."""
        if role == Role.RESULT:
            return index < self.pieces and host in self.receivers(index)
        known = part < len(self.parts) and index < len(self.cuts[part])
        return known and host in self.folders(self.piece_of(part, index))


def make_hosts(places: dict[int, PeerId]) -> tuple[Host, ...]:
    """Group ranks by machine; machines in the order of their lowest rank."""
    ranks: dict[PeerId, list[int]] = {}
    for rank in sorted(places):
        ranks.setdefault(places[rank], []).append(rank)
    return tuple(Host(peer, tuple(mine)) for peer, mine in ranks.items())
