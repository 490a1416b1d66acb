"""Where torch's Gloo begins to fold which bytes: the order ``gloo``.

Gloo folds along a ring of P ranks. The tensor is cut into P chunks; chunk c starts as what rank c - 1 gives,
travels to ranks c - 2, c - 3, ..., c + 1 and ends at rank c (all modulo P), each adding its own. Its
segments, in which it moves a chunk, never change the order, only where a chunk ends. (gloo/allreduce.cc,
``ring``; gloo/reduce.cc; torch's reduce_scatter is an all_reduce of which each rank keeps a slice.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from frogzmq.descriptor import Descriptor
from frogzmq.dtypes import dtype_of
from frogzmq.plan.plan import FOLDING, Span, Spans
from frogzmq.types import OpKind

SEGMENT_BYTES = 1 << 20
RINGED = ("float", "half")
"""Kinds of dtype whose folds depend on the order; integers come out the same in any."""


class Run(NamedTuple):
    """Bytes ``start:stop`` of a contribution, which are (in) chunk ``chunk`` of a ring."""

    start: int
    stop: int
    chunk: int


def chunk_nbytes(kind: OpKind, nbytes: int, itemsize: int, world: int) -> int:
    """Bytes of every chunk but the last ones, which may be short or empty."""
    if not nbytes:
        return 0
    most = itemsize * max(1, SEGMENT_BYTES // itemsize)
    if kind == OpKind.REDUCE:
        segment = _up(min(_ratio(nbytes, 2 * world), most), itemsize)
        segments = _up(max(_ratio(nbytes, segment), 2 * world), world)
    else:
        segments = _up(max(_ratio(nbytes, most), 2 * world), world)
        segment = _up(_ratio(nbytes, segments), itemsize)
    return segments // world * segment


def rings(descriptor: Descriptor, world: int) -> tuple[Run, ...]:
    """A contribution cut into the chunks of its ring; empty where the order does not matter.

    A reduce_scatter with splits stands for a list of tensors, and has a ring for each.
    """
    kind = dtype_of(descriptor.dtype).kind
    if descriptor.kind not in FOLDING or kind not in RINGED:
        return ()
    blocks = descriptor.blocks(0, world) if descriptor.splits else [descriptor.nbytes]
    runs: list[Run] = []
    base = 0
    for nbytes in blocks:
        step = chunk_nbytes(descriptor.kind, nbytes, descriptor.itemsize, world)
        starts = range(0, nbytes, step) if step else range(0)
        runs += [Run(base + at, base + min(at + step, nbytes), c) for c, at in enumerate(starts)]
        base += nbytes
    return tuple(runs)


def cut_rings(
    runs: Sequence[Run], nbytes: int, owners: Sequence[int], shares: Sequence[float], step: int
) -> Spans:
    """Spans of at most ``step`` bytes that cross no chunk's border; owner i gets about ``shares[i]``."""
    total, ends, reached = sum(shares), [], 0.0
    for share in shares:
        reached += share / total * nbytes
        ends.append(reached)
    spans: list[Span] = []
    for run in runs:
        for start in range(run.start, run.stop, step):
            stop = min(start + step, run.stop)
            middle = (start + stop) / 2
            owner = next((o for o, end in zip(owners, ends, strict=True) if middle <= end), owners[-1])
            spans.append(Span(len(spans), start, stop, owner))
    return tuple(spans) or (Span(0, 0, 0, owners[0]),)


def turns(spans: Spans, runs: Sequence[Run]) -> tuple[int, ...]:
    """The chunk that each span is in; both are in order."""
    found: list[int] = []
    at = 0
    for span in spans:
        while at < len(runs) - 1 and runs[at].stop <= span.start:
            at += 1
        found.append(runs[at].chunk if runs else 0)
    return tuple(found)


def _ratio(a: int, b: int) -> int:
    return -(-a // b)


def _up(value: int, to: int) -> int:
    return _ratio(value, to) * to
