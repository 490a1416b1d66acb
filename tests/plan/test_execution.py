"""Plans carried out on paper: every mode gives the reference's bytes, and moves no more than it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given as draws
from hypothesis import settings
from hypothesis import strategies as st
from support.plans import Paper, plans
from support.reference import reference, results
from support.samples import cells, sample

from frogzmq.descriptor import Descriptor
from frogzmq.dtypes import dtype_of
from frogzmq.fold.kernels import fold_into
from frogzmq.plan.plan import Plan, make_hosts
from frogzmq.plan.strategy import make_plan
from frogzmq.types import Mode, OpKind, Order, PeerId, ReduceOp


def carry_out(plan: Plan, inputs: list[np.ndarray]) -> Paper:
    """Run the plan with the real kernels."""
    descriptor = plan.descriptor

    def fold(chunks, divide_by):
        out = np.empty_like(chunks[0])
        fold_into(out, chunks, dtype_of(descriptor.dtype), descriptor.reduce, divide_by)
        return out

    return Paper(plan, inputs, fold)


def placed(*machines: int):
    """Hosts where rank r lives on machine ``machines[r]``."""
    return make_hosts({rank: PeerId(f"{machine:016x}") for rank, machine in enumerate(machines)})


def expected(plan: Plan, inputs: list[np.ndarray]) -> bytes:
    return reference(plan.descriptor, inputs, [host.ranks for host in plan.hosts], plan.order)


def given(plan: Plan, seed: int) -> list[np.ndarray]:
    dtype = dtype_of(plan.descriptor.dtype)
    sizes = [plan.descriptor.gives(rank, plan.size) // dtype.itemsize for rank in range(plan.size)]
    return [sample(dtype, size, seed + rank) for rank, size in enumerate(sizes)]


@settings(max_examples=150, deadline=None)
@draws(plans(dtypes=("float32", "bfloat16", "int8", "float64")), st.integers(0, 1 << 30))
def test_every_plan_gives_the_reference_result(plan, seed):
    inputs = given(plan, seed)
    paper = carry_out(plan, inputs)
    ranks = [rank for rank in range(plan.size) if plan.interval(rank) is not None]
    wanted = results(plan.descriptor, inputs, [host.ranks for host in plan.hosts], plan.order)
    assert [paper.result(rank) for rank in ranks] == [wanted[rank] for rank in ranks]
    assert [r for r in range(plan.size) if wanted[r] is not None] == ranks
    for rank in ranks:
        assert len(paper.result(rank)) == plan.descriptor.gets(rank, plan.size)


DEALT_OUT = (OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)


@settings(max_examples=150, deadline=None)
@draws(plans(kinds=DEALT_OUT), st.integers(0, 1 << 30))
def test_only_what_another_machine_reads_crosses_to_it_and_once(plan, seed):
    """Every machine receives exactly what its ranks read of others, folded per machine where it can be."""
    descriptor, world = plan.descriptor, plan.size
    paper = carry_out(plan, given(plan, seed))
    for index, host in enumerate(plan.hosts):
        foreign = [part for part in plan.parts if part.host != index]
        if descriptor.kind == OpKind.GATHER:
            least = sum(descriptor.gives(p.ranks[0], world) for p in foreign) if plan.needs(index) else 0
        else:
            blocks = [descriptor.blocks(part.ranks[0], world) for part in foreign]
            least = sum(row[rank] for row in blocks for rank in host.ranks)
        assert paper.received[index] == least == plan.arriving[index]


@settings(max_examples=100, deadline=None)
@draws(
    st.sampled_from(cells()),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.sampled_from([Order.MACHINE, Order.RANK]),
    st.sampled_from([0, 1, 7, 1000]),
    st.integers(0, 1 << 30),
)
def test_modes_give_the_same_bits_for_every_cell(cell, machines, order, numel, seed):
    dtype, op = cell
    inputs = [sample(dtype, numel, seed + rank) for rank in range(len(machines))]
    descriptor = Descriptor(OpKind.ALL_REDUCE, op, dtype.name, (numel,))
    hosts = placed(*machines)
    shares = [1.0 + (host * 7 + seed) % 3 for host in range(len(hosts))]
    found = set()
    for mode, chunk in (
        (Mode.FAITHFUL, 1 << 20),
        (Mode.FAITHFUL, 640),
        (Mode.SHARD, 1 << 20),
        (Mode.SHARD, 100),
    ):
        plan = make_plan(descriptor, hosts, mode, order, chunk_bytes=chunk, small_bytes=0, shares=shares)
        paper = carry_out(plan, inputs)
        found |= {paper.result(rank) for rank in range(len(machines))}
    assert found == {expected(plan, inputs)}


def test_orders_differ_in_bits_and_placement_matters_only_for_machine_order():
    dtype = dtype_of("float32")
    inputs = [sample(dtype, 1000, rank, special=False) for rank in range(4)]
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (1000,))

    def run(order, *machines):
        plan = make_plan(descriptor, placed(*machines), Mode.SHARD, order, chunk_bytes=512, small_bytes=0)
        return carry_out(plan, inputs).result(0)

    assert run(Order.RANK, 0, 0, 1, 1) == run(Order.RANK, 0, 1, 0, 1) == run(Order.RANK, 0, 0, 0, 0)
    assert run(Order.MACHINE, 0, 0, 1, 1) != run(Order.MACHINE, 0, 1, 0, 1)
    assert run(Order.MACHINE, 0, 1, 2, 3) == run(Order.RANK, 0, 1, 2, 3), "one rank a machine: the same order"


@pytest.mark.parametrize("machines", [3, 4, 5])
def test_a_machine_without_share_moves_the_tensor_once_each_way(machines):
    nbytes = 64 * 1024
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "uint8", (nbytes,))
    shares = [0.0] + [1.0] * (machines - 1)
    inputs = [np.full(nbytes, rank, np.uint8) for rank in range(machines)]
    plan = make_plan(
        descriptor,
        placed(*range(machines)),
        Mode.SHARD,
        Order.MACHINE,
        chunk_bytes=4096,
        small_bytes=0,
        shares=shares,
    )
    paper = carry_out(plan, inputs)
    assert (paper.sent[0], paper.received[0]) == (nbytes, nbytes)
    # Everyone else with share f moves S * (1 + (N - 2) * f).
    for host in range(1, machines):
        share = sum(span.stop - span.start for span in plan.spans if span.owner == host)
        assert paper.sent[host] == paper.received[host] == nbytes + (machines - 2) * share


@pytest.mark.parametrize("root", [0, 1, 3])
def test_sharded_broadcast_leaves_the_source_once(root):
    nbytes = 10_001
    descriptor = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (nbytes,), root)
    inputs = [np.full(nbytes, rank, np.uint8) for rank in range(4)]
    plan = make_plan(
        descriptor, placed(0, 1, 2, 3), Mode.SHARD, Order.MACHINE, chunk_bytes=1024, small_bytes=0
    )
    paper = carry_out(plan, inputs)
    assert (paper.sent[root], paper.received[root]) == (nbytes, 0)
    assert {paper.received[host] for host in range(4) if host != root} == {nbytes}


def test_one_machine_moves_nothing():
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.AVG, "float32", (500,))
    inputs = [sample(dtype_of("float32"), 500, rank) for rank in range(3)]
    plan = make_plan(descriptor, placed(0, 0, 0), Mode.AUTO, Order.MACHINE, chunk_bytes=512, small_bytes=0)
    paper = carry_out(plan, inputs)
    assert paper.result(0) == expected(plan, inputs)
    assert not paper.sent
    assert not paper.received
