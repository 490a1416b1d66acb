"""Choosing the mode of an op and cutting it into spans."""

from __future__ import annotations

from collections.abc import Sequence

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch
from frogzmq.plan.gloo import cut_rings, rings, turns
from frogzmq.plan.layout import DEALT, GATHERED, cut_run, dealt, gathered
from frogzmq.plan.plan import JOINED, Host, Part, Plan, Span, Spans
from frogzmq.types import Mode, OpKind, Order
from frogzmq.wire import limits

ALIGN = 64
"""Spans begin at multiples of this many bytes: whole elements of every dtype, whole cache lines."""

TWO_OWNERS_BYTES = 12 << 20
"""From this size on two machines share the folding of an all_reduce. Both ways move the same bytes; owners
fold each byte once instead of twice, and the round that it costs is short beside the transfer."""

LARGE_CHUNKS = 48
"""A tensor of at least this many chunks is cut into chunks of twice the size: the pipeline is full anyway,
and each chunk costs the peers' loops about half a millisecond together."""


def resolve_mode(descriptor: Descriptor, hosts: int, mode: Mode, small_bytes: int) -> Mode:
    """Turn ``auto`` into a mode: one exchange where latency rules or two machines meet, else owners.

    With two machines both modes move the tensor once each way: ``faithful`` saves a round, ``shard`` half the
    folding.
    """
    if mode != Mode.AUTO:
        return mode
    if hosts == 2 and descriptor.kind == OpKind.ALL_REDUCE and descriptor.nbytes >= TWO_OWNERS_BYTES:
        return Mode.SHARD
    if hosts <= 2 or descriptor.nbytes <= small_bytes or descriptor.kind in (*GATHERED, *DEALT):
        return Mode.FAITHFUL
    return Mode.SHARD


def aligned(chunk_bytes: int) -> int:
    """``chunk_bytes`` rounded down to whole cache lines."""
    return max(ALIGN, chunk_bytes // ALIGN * ALIGN)


def cut(nbytes: int, owners: Sequence[int], shares: Sequence[float], chunk_bytes: int) -> Spans:
    """Cut ``nbytes`` into spans of at most ``chunk_bytes``; owner i gets about ``shares[i]`` of them.

    Shares need not sum to one; an owner without a share gets nothing (equal shares if nobody has one).
    There is always at least one span, perhaps of no bytes. ``chunk_bytes`` is rounded down to ``ALIGN``.
    """
    weighed = [(owner, share) for owner, share in zip(owners, shares, strict=True) if share > 0]
    weighed = weighed or [(owner, 1.0) for owner in owners]
    total = sum(share for _, share in weighed)
    step = aligned(chunk_bytes)
    spans: list[Span] = []
    start, before = 0, 0.0
    for place, (owner, share) in enumerate(weighed, 1):
        before += share
        last = place == len(weighed)  # takes the odd bytes at the end
        end = nbytes if last else min(nbytes, round(nbytes * before / total / ALIGN) * ALIGN)
        cut_run(spans, start, end, owner, step)
        start = max(start, end)
    return tuple(spans) or (Span(0, 0, 0, weighed[0][0]),)


def make_parts(descriptor: Descriptor, hosts: Sequence[Host], order: Order) -> tuple[Part, ...]:
    """The units of contribution, in the order in which they are folded (or stand in the result)."""
    where = {rank: index for index, host in enumerate(hosts) for rank in host.ranks}
    if descriptor.kind in (OpKind.BROADCAST, OpKind.SCATTER):
        return (Part(0, where[descriptor.root], (descriptor.root,)),)
    if descriptor.kind in JOINED and order == Order.MACHINE and len(hosts) > 1:
        return tuple(Part(i, i, host.ranks) for i, host in enumerate(hosts))
    # One machine: one level of folding in rank order, which is what ``machine`` means there too.
    return tuple(Part(rank, where[rank], (rank,)) for rank in sorted(where))


def make_plan(
    descriptor: Descriptor,
    hosts: tuple[Host, ...],
    mode: Mode,
    order: Order,
    *,
    chunk_bytes: int,
    small_bytes: int,
    shares: Sequence[float] | None = None,
) -> Plan:
    """Plan one op. ``shares``: weight of each host as an owner (default: equal).

    ``Mismatch`` where no group of this size can run the op: see ``Descriptor.misfit``.
    """
    ranks = [rank for host in hosts for rank in host.ranks]
    misfit = descriptor.misfit(ranks)
    if misfit:
        raise Mismatch(f"{descriptor.describe()}: {misfit}")
    mode = resolve_mode(descriptor, len(hosts), mode, small_bytes)
    parts = make_parts(descriptor, hosts, order)
    largest = max(descriptor.gives(part.ranks[0], len(ranks)) for part in parts)
    if largest >= LARGE_CHUNKS * chunk_bytes:
        chunk_bytes = min(2 * chunk_bytes, limits.CHUNK_BYTES)
    step = aligned(chunk_bytes)
    runs = rings(descriptor, len(ranks)) if order == Order.GLOO else ()
    if descriptor.kind in (*GATHERED, *DEALT):
        if descriptor.kind in GATHERED:
            cuts, layout = gathered(descriptor, hosts, parts, step)
        else:
            cuts, layout = dealt(descriptor, hosts, parts, step, [run.start for run in runs])
        return Plan(descriptor, hosts, mode, order, parts, cuts, layout, turns(cuts[0], runs) if runs else ())
    owners, weights = _owners(descriptor, hosts, mode, parts, shares)
    if runs:
        spans = cut_rings(runs, descriptor.nbytes, owners, weights, step)
        return Plan(descriptor, hosts, mode, order, parts, (spans,) * len(parts), None, turns(spans, runs))
    spans = cut(descriptor.nbytes, owners, weights, chunk_bytes)
    return Plan(descriptor, hosts, mode, order, parts, (spans,) * len(parts))


def _owners(
    descriptor: Descriptor,
    hosts: Sequence[Host],
    mode: Mode,
    parts: Sequence[Part],
    shares: Sequence[float] | None,
) -> tuple[list[int], list[float]]:
    """Machines that fold for others, and how much of the result each."""
    if descriptor.kind == OpKind.BARRIER:
        return [0], [1.0]
    if mode == Mode.FAITHFUL:
        # Nobody folds for others, so owners would only add cuts.
        return [next((i for i, h in enumerate(hosts) if descriptor.root in h.ranks), 0)], [1.0]
    weights = list(shares) if shares is not None else [1.0] * len(hosts)
    if descriptor.kind == OpKind.BROADCAST and len(hosts) > 1:
        weights[parts[0].host] = 0.0  # the source sends each byte once; the others pass it on
    return list(range(len(hosts))), weights
