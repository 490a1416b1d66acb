"""Gather, scatter, reduce_scatter and all_to_all between processes with nothing but numpy and a client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakepeer import FakePeer, join_request
from support.fleet import Fleet
from support.light import LightJob, LightRank

from frogzmq.client import Client
from frogzmq.descriptor import Descriptor
from frogzmq.errors import Mismatch, WireError
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire import limits
from frogzmq.wire import ranks as w


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("kinds")) as fleet:
        fleet.start()
        fleet.start()
        yield fleet


@pytest.fixture(params=[1, 2], ids=["one peer", "two peers"])
def peers(request: pytest.FixtureRequest, fleet: Fleet) -> list[Any]:
    return fleet.peers[: request.param]


def exchange(me: LightRank, count: int) -> list[str]:
    """Every kind once, even and uneven; returns what went wrong."""
    from frogzmq.descriptor import Descriptor
    from frogzmq.types import OpKind, ReduceOp

    group, rank, world = me.join(timeout_s=60), me.rank, me.size
    wrong: list[str] = []

    def call(kind: OpKind, numel: int, root: int, splits: tuple[int, ...], give: Any, want: Any) -> None:
        reduce = ReduceOp.SUM if kind == OpKind.REDUCE_SCATTER else ReduceOp.NONE
        called = Descriptor(kind, reduce, "int64", (numel,), root, splits)
        got = np.full(max(called.gets(rank, world), 0) // 8, -1)
        src = np.ascontiguousarray(give).view(np.uint8) if called.gives(rank, world) else None
        group.post(called, src, [got.view(np.uint8)] if want is not None else []).wait()
        if want is not None and not np.array_equal(got, want):
            wrong.append(called.describe())

    def block(source: int, target: int, length: int) -> Any:
        return np.arange(length) + 1000 * source + 100 * target

    ranks, root = range(world), world - 1
    mine = rank == root
    uneven = tuple(count * r for r in ranks)  # rank 0 has nothing
    matrix = [[count * ((s + 2 * d) % 3) for d in ranks] for s in ranks]

    def all_of(sizes: Any) -> Any:
        return np.concatenate([block(s, 0, n) for s, n in enumerate(sizes)])

    even = [count] * world
    call(OpKind.GATHER, count, root, (), block(rank, 0, count), all_of(even) if mine else None)
    give = block(rank, 0, uneven[rank])
    call(OpKind.GATHER, sum(uneven), root, uneven, give, all_of(uneven) if mine else None)
    call(OpKind.ALL_GATHER, sum(uneven), -1, uneven, give, all_of(uneven))
    call(OpKind.SCATTER, count, root, (), all_of(even), block(rank, 0, count))
    for sizes, splits in ((even, ()), (uneven, uneven)):
        give = np.arange(sum(sizes)) * (rank + 1)
        start = sum(sizes[:rank])
        want = np.arange(start, start + sizes[rank]) * (world * (world + 1) // 2)
        call(OpKind.REDUCE_SCATTER, sum(sizes), -1, splits, give, want)
    for rows in ([even] * world, matrix):
        splits = () if rows is not matrix else tuple(n for row in matrix for n in row)
        numel = sum(splits) if splits else world * count
        give = np.concatenate([block(rank, d, rows[rank][d]) for d in ranks])
        want = np.concatenate([block(s, rank, rows[s][rank]) for s in ranks])
        call(OpKind.ALL_TO_ALL, numel, -1, splits, give, want)
    group.close()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_processes_exchange_by_every_kind(tmp_path: Path, peers: list[Any], size: int) -> None:
    with LightJob(tmp_path) as job:
        for count in (1, 1000, 300_000):
            for rank in job.start(exchange, size, peers, count, processes=range(size)):
                assert rank.finish(60) == []


LONG = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "uint8", (2_750_000,), -1, (250,) * 11_000)


def test_where_descriptor_and_bytes_do_not_fit_one_message_the_bytes_use_the_arena(tmp_path: Path) -> None:
    assert len(LONG.encoded) <= limits.DESCRIPTOR_BYTES
    with FakePeer(tmp_path) as peer:
        client = Client(tmp_path)
        group = client.join(join_request(0, 1, timeout_s=20.0))
        peer.hold = True
        for size in (10_000, 30_000):
            group.post(LONG, np.zeros(size, np.uint8), [])
        until = time.monotonic() + 10
        while len(peer.said(w.Post)) < 2 and time.monotonic() < until:
            group.pump()  # the second waits for its lease
            time.sleep(0.01)
        small, large = peer.said(w.Post)
        assert (small.flags, small.nbytes) == (w.INLINE, 10_000)
        assert (large.flags, large.nbytes) == (0, 30_000)
        client.close()


def test_the_peer_takes_such_a_post_and_says_that_the_splits_do_not_fit_the_group(
    tmp_path: Path, fleet: Fleet
) -> None:
    def rank(me: LightRank, called: Descriptor) -> None:
        group = me.join(timeout_s=20)
        group.post(called, np.zeros(30_000, np.uint8), [np.zeros(called.nbytes, np.uint8)]).wait()

    with LightJob(tmp_path) as job:
        ranks = job.start(rank, 2, fleet.peers, LONG)
        for one in ranks:
            with pytest.raises(Mismatch, match="11000 splits in a group of 2 ranks"):
                one.finish(30)


def test_too_many_splits_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    called = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "uint8", (2_500_000,), -1, (100,) * 25_000)
    with FakePeer(tmp_path):
        client = Client(tmp_path)
        group = client.join(join_request(0, 1, timeout_s=20.0))
        with pytest.raises(WireError, match="25000 splits .* limit 49152"):
            group.post(called, np.zeros(100, np.uint8), [])
        assert group.error() is None
        client.close()
