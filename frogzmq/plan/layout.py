"""Results that are more than one contribution, or differ from rank to rank: which piece stands where.

*Gathered* kinds (all_gather, gather) put the parts side by side, for everyone or for the root. *Dealt* kinds
(scatter, reduce_scatter, all_to_all) cut what is given into blocks, one for each rank: a span never crosses
a block's border, goes only to the machine of the rank that reads it, and stands in that rank's interval.

A block of no bytes has no span, except where a part has nothing else for a machine: then one empty chunk
tells that machine that the part's ranks have called the same op.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from frogzmq.descriptor import Descriptor
from frogzmq.plan.plan import JOINED, Host, Interval, Layout, Part, Piece, Span, Spans
from frogzmq.types import OpKind

GATHERED = (OpKind.ALL_GATHER, OpKind.GATHER)
DEALT = (OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)


def cut_run(spans: list[Span], start: int, stop: int, owner: int, step: int) -> None:
    """Append spans of at most ``step`` bytes that cover ``start:stop``: none where that is empty."""
    for at in range(start, stop, step):
        spans.append(Span(len(spans), at, min(at + step, stop), owner))


# -------------------------------------------------------------------- gathered
def gathered(
    descriptor: Descriptor, hosts: Sequence[Host], parts: Sequence[Part], step: int
) -> tuple[tuple[Spans, ...], Layout]:
    """Cuts and layout of an op that puts its parts side by side."""
    world = len(parts)
    everyone = descriptor.kind == OpKind.ALL_GATHER
    readers = tuple(i for i, host in enumerate(hosts) if everyone or descriptor.root in host.ranks)
    known: dict[int, Spans] = {}
    cuts: list[Spans] = []
    pieces: list[Piece] = []
    number: list[tuple[int, ...]] = []
    base = 0
    for part in parts:
        nbytes = descriptor.gives(part.ranks[0], world)
        spans = known.get(nbytes)
        if spans is None:
            run: list[Span] = []
            cut_run(run, 0, nbytes, readers[0], step)
            spans = known[nbytes] = tuple(run) or (Span(0, 0, 0, readers[0]),)
        cuts.append(spans)
        number.append(tuple(range(len(pieces), len(pieces) + len(spans))))
        pieces += [Piece(base + s.start, s.stop - s.start, part.index, s.index, readers) for s in spans]
        base += nbytes
    whole = Interval(0, base, 0, len(pieces))
    ranks = [rank for host in readers for rank in hosts[host].ranks if everyone or rank == descriptor.root]
    room = tuple(base if host in readers else 0 for host in range(len(hosts)))
    return tuple(cuts), Layout(tuple(pieces), tuple(number), dict.fromkeys(ranks, whole), room)


# ----------------------------------------------------------------------- dealt
def dealt(
    descriptor: Descriptor,
    hosts: Sequence[Host],
    parts: Sequence[Part],
    step: int,
    borders: Sequence[int] = (),
) -> tuple[tuple[Spans, ...], Layout]:
    """Cuts and layout of an op that gives every rank something of its own.

    ``borders``: offsets, ascending, that no span may cross besides those of the blocks.
    """
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host.ranks}
    world = len(host_of)
    joined = descriptor.kind in JOINED
    given = parts[:1] if joined else parts  # all parts of a reduce_scatter are cut alike
    cuts: list[Spans] = []
    by_reader: list[list[list[Span]]] = []
    """Of each part, for each reading rank: its spans."""
    for part in given:
        blocks = descriptor.blocks(part.ranks[0], world)
        readers = _cut_blocks(blocks, hosts, host_of, step, borders)
        by_reader.append(readers)
        cuts.append(tuple(span for spans in readers for span in spans))
    # The root's machine hands out its own ranks' slices from where the root wrote them: see ``dataplane``.
    in_place = host_of[descriptor.root] if descriptor.kind == OpKind.SCATTER else -1
    room = [0] * len(hosts)
    pieces: list[Piece] = []
    number = [[0] * len(spans) for spans in cuts]
    intervals: dict[int, Interval] = {}
    for rank in range(world):
        host, first = host_of[rank], len(pieces)
        start = at = rank * descriptor.nbytes if host == in_place else room[host]
        for part, readers in zip(given, by_reader, strict=True):
            for span in readers[rank]:
                number[part.index][span.index] = len(pieces)
                source = -1 if joined else part.index
                pieces.append(Piece(at, span.stop - span.start, source, span.index, (host,)))
                at += span.stop - span.start
        room[host] = at
        intervals[rank] = Interval(start, at, first, len(pieces))
    if in_place >= 0:
        room[in_place] = world * descriptor.nbytes
    copies = len(parts) if joined else 1
    numbers = tuple(tuple(row) for row in number) * copies
    return tuple(cuts) * copies, Layout(tuple(pieces), numbers, intervals, tuple(room))


def _cut_blocks(
    blocks: Sequence[int],
    hosts: Sequence[Host],
    host_of: dict[int, int],
    step: int,
    borders: Sequence[int],
) -> list[list[Span]]:
    """Spans of each block of a part; block r goes to rank r."""
    nothing = {host.ranks[0] for host in hosts if not any(blocks[rank] for rank in host.ranks)}
    spans: list[Span] = []
    readers: list[list[Span]] = []
    offset = 0
    for rank, nbytes in enumerate(blocks):
        before, owner = len(spans), host_of[rank]
        inside = borders[bisect_right(borders, offset) : bisect_left(borders, offset + nbytes)]
        for start, stop in pairwise((offset, *inside, offset + nbytes)):
            cut_run(spans, start, stop, owner, step)
        if rank in nothing:
            spans.append(Span(len(spans), offset, offset, owner))
        readers.append(spans[before:])
        offset += nbytes
    return readers
