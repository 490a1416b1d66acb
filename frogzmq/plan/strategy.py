"""Choosing the mode of an op and cutting it into spans."""

from __future__ import annotations

from collections.abc import Sequence

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch
from frogzmq.plan.plan import FOLDING, Host, Part, Plan, Span
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
    if hosts <= 2 or descriptor.nbytes <= small_bytes or descriptor.kind == OpKind.ALL_GATHER:
        return Mode.FAITHFUL
    return Mode.SHARD


def cut(nbytes: int, owners: Sequence[int], shares: Sequence[float], chunk_bytes: int) -> tuple[Span, ...]:
    """Cut ``nbytes`` into spans of at most ``chunk_bytes``; owner i gets about ``shares[i]`` of them.

    Shares need not sum to one; an owner without a share gets nothing (equal shares if nobody has one).
    There is always at least one span, perhaps of no bytes. ``chunk_bytes`` is rounded down to ``ALIGN``.
    """
    weighed = [(owner, share) for owner, share in zip(owners, shares, strict=True) if share > 0]
    weighed = weighed or [(owner, 1.0) for owner in owners]
    total = sum(share for _, share in weighed)
    step = max(ALIGN, chunk_bytes // ALIGN * ALIGN)
    spans: list[Span] = []
    start, before = 0, 0.0
    for place, (owner, share) in enumerate(weighed, 1):
        before += share
        last = place == len(weighed)  # takes the odd bytes at the end
        end = nbytes if last else min(nbytes, round(nbytes * before / total / ALIGN) * ALIGN)
        while start < end:
            stop = min(end, start + step)
            spans.append(Span(len(spans), start, stop, owner))
            start = stop
    return tuple(spans) or (Span(0, 0, 0, weighed[0][0]),)


def make_parts(descriptor: Descriptor, hosts: Sequence[Host], order: Order) -> tuple[Part, ...]:
    """The units of contribution, in the order in which they are folded (or stand in the result)."""
    where = {rank: index for index, host in enumerate(hosts) for rank in host.ranks}
    if descriptor.kind == OpKind.BROADCAST:
        return (Part(0, where[descriptor.root], (descriptor.root,)),)
    joined = descriptor.kind in FOLDING or descriptor.kind == OpKind.BARRIER
    if joined and order == Order.MACHINE and len(hosts) > 1:
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

    ``Mismatch`` where the op needs a root rank and the group has no such rank.
    """
    rooted = descriptor.kind in (OpKind.BROADCAST, OpKind.REDUCE)
    if rooted and not any(descriptor.root in host.ranks for host in hosts):
        ranks = sorted(rank for host in hosts for rank in host.ranks)
        raise Mismatch(f"{descriptor.describe()}: no such root rank in this group of ranks {ranks}")
    mode = resolve_mode(descriptor, len(hosts), mode, small_bytes)
    parts = make_parts(descriptor, hosts, order)
    weights = list(shares) if shares is not None else [1.0] * len(hosts)
    owners = list(range(len(hosts)))
    if mode == Mode.SHARD and descriptor.kind == OpKind.BROADCAST and len(hosts) > 1:
        weights[parts[0].host] = 0.0  # the source sends each byte once; the others pass it on
    if mode == Mode.FAITHFUL or descriptor.kind == OpKind.ALL_GATHER:
        # Nobody folds for others, so owners would only add cuts.
        owner = next((i for i, h in enumerate(hosts) if descriptor.root in h.ranks), 0)
        owners, weights = [owner], [1.0]
    if descriptor.kind == OpKind.BARRIER:
        owners, weights = [0], [1.0]
    if descriptor.nbytes >= LARGE_CHUNKS * chunk_bytes:
        chunk_bytes = min(2 * chunk_bytes, limits.CHUNK_BYTES)
    spans = cut(descriptor.nbytes, owners, weights, chunk_bytes)
    return Plan(descriptor, hosts, mode, order, parts, spans)
