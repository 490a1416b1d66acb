"""What must hold for every plan: all bytes, once, folded from everything, handed to all who need them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.plans import itemsize, plans

from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch
from frogzmq.plan.plan import Host, make_hosts
from frogzmq.plan.strategy import ALIGN, cut, make_plan, resolve_mode
from frogzmq.types import Mode, OpKind, Order, PeerId, ReduceOp

DTYPES = ("uint8", "float16", "float32", "float64", "complex128")


def peer(number: int) -> PeerId:
    return PeerId(f"{number:016x}")


def hosts_of(*sizes: int) -> tuple[Host, ...]:
    """Machines with so many ranks each, ranks counted through."""
    owner = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    return make_hosts({rank: peer(machine) for rank, machine in enumerate(owner)})


def plan_of(kind=OpKind.ALL_REDUCE, *, sizes=(1, 1, 1), numel=6144, mode=Mode.SHARD, root=-1, **options):
    reduce = ReduceOp.SUM if kind in (OpKind.ALL_REDUCE, OpKind.REDUCE) else ReduceOp.NONE
    descriptor = Descriptor(kind, reduce, "uint8", (numel,), root)
    options = {"chunk_bytes": 1024, "small_bytes": 0, **options}
    return make_plan(descriptor, hosts_of(*sizes), mode, options.pop("order", Order.MACHINE), **options)


@given(plans(dtypes=DTYPES))
def test_spans_cover_every_part_once(plan):
    assert len(plan.cuts) == len(plan.parts)
    for spans, nbytes in zip(plan.cuts, plan.part_nbytes, strict=True):
        assert [span.index for span in spans] == list(range(len(spans)))
        assert (spans[0].start, spans[-1].stop) == (0, nbytes)
        assert all(a.stop == b.start for a, b in pairwise(spans))
        assert all(0 <= span.owner < len(plan.hosts) for span in spans)
        empty = sum(span.start == span.stop for span in spans)
        assert empty == (nbytes == 0) or (plan.layout is not None and empty < len(plan.hosts) + 1)


@given(plans(dtypes=DTYPES))
def test_spans_hold_whole_elements_and_begin_at_cache_lines(plan):
    for spans in plan.cuts:
        for span in spans:
            assert span.start % (ALIGN if plan.layout is None else itemsize(plan)) == 0
            assert (span.stop - span.start) % itemsize(plan) == 0


@given(plans())
def test_pieces_cover_what_each_rank_reads_once(plan):
    for rank in range(plan.size):
        interval, size = plan.interval(rank), plan.descriptor.gets(rank, plan.size)
        assert (interval is None) == (size < 0)
        if interval is None:
            continue
        ranges = [plan.bounds(piece) for piece in range(interval.first, interval.last)]
        assert interval.stop - interval.start == size
        assert [interval.start, *(stop for _, stop in ranges)] == [
            *(start for start, _ in ranges),
            interval.stop,
        ]


@given(plans())
def test_a_machine_makes_room_for_its_own_ranks_only(plan):
    for index, host in enumerate(plan.hosts):
        reads = {i for rank in host.ranks if (i := plan.interval(rank)) is not None}
        room = plan.result_nbytes(index)
        assert all(i.stop <= room for i in reads)
        if plan.layout is None or (plan.descriptor.kind == OpKind.SCATTER and index == plan.root_host):
            continue  # there the result is the root's own contribution
        assert room == sum(i.stop - i.start for i in reads)


@given(plans())
def test_dealt_out_spans_do_not_cross_borders_and_go_to_their_reader_alone(plan):
    kinds = (OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)
    assume(plan.descriptor.kind in kinds)
    for part in plan.parts:
        ends = list(accumulate(plan.descriptor.blocks(part.ranks[0], plan.size)))
        for span in plan.cuts[part.index]:
            if span.start < span.stop:
                reader = bisect_right(ends, span.start)
                assert span.stop <= ends[reader]
                assert reader in plan.hosts[span.owner].ranks
            assert plan.folders(plan.piece_of(part.index, span.index)) == (span.owner,)


@given(plans())
def test_every_machine_hears_of_every_part_that_it_could_get_something_of(plan):
    if plan.layout is None or plan.descriptor.kind == OpKind.GATHER:
        return
    for part, spans in enumerate(plan.cuts):
        heard = {h for span in spans for h in plan.folders(plan.piece_of(part, span.index))}
        assert heard == set(range(len(plan.hosts)))


@given(plans())
def test_every_part_chunk_goes_into_exactly_one_piece(plan):
    used = [source for piece in range(plan.pieces) for source in plan.sources(piece)]
    assert sorted(used) == [(part.index, span.index) for part in plan.parts for span in plan.cuts[part.index]]
    for piece in range(plan.pieces):
        assert all(plan.piece_of(part, span) == piece for part, span in plan.sources(piece))


@given(plans())
def test_every_piece_reaches_every_machine_that_needs_it(plan):
    for piece in range(plan.pieces):
        folders, receivers = plan.folders(piece), plan.receivers(piece)
        assert folders
        assert len({*folders, *receivers}) == len(folders) + len(receivers), "nobody gets it twice"
        needy = {h for h in range(len(plan.hosts)) if plan.needs(h)}
        assert needy <= {*folders, *receivers} or plan.layout is not None
        assert all(plan.needs(host) for host in receivers)
        assert not receivers or plan.sender(piece) in folders


@given(plans())
def test_parts_are_pushed_to_those_who_fold_them_and_to_nobody_else(plan):
    for piece in range(plan.pieces):
        for part, span in plan.sources(piece):
            origin, targets = plan.parts[part].host, plan.part_targets(part, span)
            assert origin not in targets
            assert len(set(targets)) == len(targets)
            assert {*targets, origin} == {*plan.folders(piece), origin}


@given(plans())
def test_parts_hold_every_rank_once_and_stay_on_their_machine(plan):
    ranks = [rank for part in plan.parts for rank in part.ranks]
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))
    if plan.descriptor.kind in (OpKind.BROADCAST, OpKind.SCATTER):
        assert ranks == [plan.descriptor.root]
    else:
        assert sorted(ranks) == list(range(plan.size))
    for part in plan.parts:
        assert set(part.ranks) <= set(plan.hosts[part.host].ranks)
    if plan.order == Order.RANK or plan.fan_in == 1 or len(plan.hosts) == 1:
        assert ranks == sorted(ranks)


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 5).map(peer), min_size=1))
def test_hosts_do_not_depend_on_the_order_of_the_members(places):
    hosts = make_hosts(places)
    assert hosts == make_hosts(dict(reversed(places.items())))
    assert [host.ranks[0] for host in hosts] == sorted(min(host.ranks) for host in hosts)
    assert {rank: host.peer for host in hosts for rank in host.ranks} == places


@settings(max_examples=200)
@given(
    st.integers(0, 20_000),
    st.lists(st.just(0.0) | st.floats(0, 1e6), min_size=1, max_size=6),
    st.integers(1, 5000),
)
def test_cut_keeps_to_shares_and_sizes(nbytes, shares, chunk):
    spans = cut(nbytes, range(len(shares)), shares, chunk)
    weights = shares if any(shares) else [1.0] * len(shares)
    for owner, weight in enumerate(weights):
        owned = sum(span.stop - span.start for span in spans if span.owner == owner)
        assert abs(owned - nbytes * weight / sum(weights)) <= ALIGN + 1
        assert weight > 0 or owned == 0, "no share, no span"
    assert all(span.stop - span.start <= max(chunk, ALIGN) for span in spans)


def test_no_bytes_are_still_one_span():
    assert [(span.start, span.stop) for span in cut(0, [0, 1], [1, 1], 100)] == [(0, 0)]


@pytest.mark.parametrize(
    ("kind", "hosts", "nbytes", "expected"),
    [
        (OpKind.ALL_REDUCE, 1, 1 << 20, Mode.FAITHFUL),
        (OpKind.ALL_REDUCE, 2, 1 << 20, Mode.FAITHFUL),
        (OpKind.ALL_REDUCE, 2, 64 << 20, Mode.SHARD),
        (OpKind.BROADCAST, 2, 64 << 20, Mode.FAITHFUL),
        (OpKind.ALL_REDUCE, 3, 1000, Mode.FAITHFUL),
        (OpKind.ALL_REDUCE, 3, 1001, Mode.SHARD),
        (OpKind.BROADCAST, 3, 1001, Mode.SHARD),
        (OpKind.ALL_GATHER, 9, 1 << 20, Mode.FAITHFUL),
        (OpKind.ALL_TO_ALL, 9, 1 << 20, Mode.FAITHFUL),
    ],
)
def test_auto_chooses_by_size_and_machines(kind, hosts, nbytes, expected):
    descriptor = Descriptor(kind, ReduceOp.NONE, "uint8", (nbytes,), 0)
    assert resolve_mode(descriptor, hosts, Mode.AUTO, 1000) == expected
    assert resolve_mode(descriptor, hosts, Mode.SHARD, 1000) == Mode.SHARD
    assert resolve_mode(descriptor, hosts, Mode.FAITHFUL, 1000) == Mode.FAITHFUL


def test_machine_order_gives_one_part_a_machine():
    plan = plan_of(sizes=(2, 3))
    assert [part.ranks for part in plan.parts] == [(0, 1), (2, 3, 4)]
    assert [part.ranks for part in plan_of(sizes=(2, 3), order=Order.RANK).parts] == [
        (0,),
        (1,),
        (2,),
        (3,),
        (4,),
    ]
    assert len(plan_of(sizes=(4,)).parts) == 4, "one machine folds its ranks in one level"


def test_only_the_root_machine_gets_a_reduced_result():
    plan = plan_of(OpKind.REDUCE, sizes=(1, 2, 1), root=2)
    assert plan.root_host == 1
    assert [plan.needs(host) for host in range(3)] == [False, True, False]
    assert {plan.receivers(piece) for piece in range(plan.pieces)} == {(), (1,)}
    faithful = plan_of(OpKind.REDUCE, sizes=(1, 2, 1), root=2, mode=Mode.FAITHFUL)
    assert {faithful.folders(piece) for piece in range(faithful.pieces)} == {(1,)}


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_source_owns_nothing_in_shard(root):
    plan = plan_of(OpKind.BROADCAST, root=root, numel=6145)
    assert root not in {span.owner for span in plan.spans}


@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.REDUCE])
def test_a_root_outside_the_group_is_named(kind):
    with pytest.raises(Mismatch, match=r"root 7: no such root rank .*\[0, 1, 2\]"):
        plan_of(kind, root=7)


def test_all_gather_is_not_cut_by_owner():
    plan = plan_of(OpKind.ALL_GATHER, numel=1000)
    assert len(plan.spans) == 1
    assert plan.result_nbytes(0) == 3000


@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.BROADCAST])
@pytest.mark.parametrize("mode", [Mode.SHARD, Mode.FAITHFUL])
def test_tensors_beyond_four_gib_are_cut_without_a_gap(kind, mode):
    numel = (9 << 30) + 1
    root = 1 if kind == OpKind.BROADCAST else -1
    plan = plan_of(kind, numel=numel, mode=mode, root=root, chunk_bytes=1 << 20)
    assert plan.descriptor.nbytes == numel
    assert set(plan.part_nbytes) == {numel}
    spans = plan.cuts[0]
    assert spans[0].start == 0
    assert spans[-1].stop == numel
    assert all(a.stop == b.start for a, b in pairwise(spans))
