"""gather, scatter, reduce_scatter, all_to_all and their spellings, against local torch."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch
PLACEMENTS = [[0, 0], [0, 1, 1], [0, 1, 2, 0]]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (100_003,)]
MIXED = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]


def given(rank: int, shape, dtype=torch.float32, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + salt)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


def gathers(rank: int, size: int) -> None:
    for n, shape in enumerate(SHAPES):
        for root in {0, size - 1}:
            dtype = MIXED[n % len(MIXED)]
            want = [given(r, shape, dtype) for r in range(size)]
            outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(want[rank], outs, dst=root)
            if outs is not None:
                assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True)), (shape, root)
            out = torch.zeros(shape, dtype=dtype)
            dist.scatter(out, [w + w for w in want] if rank == root else None, src=root)
            assert torch.equal(out, want[rank] + want[rank]), (shape, root)
    strided = torch.zeros(6, 4)[:, ::2]
    dist.scatter(strided, [given(r, (6, 2)) for r in range(size)] if rank == 1 else None, src=1)
    assert torch.equal(strided, given(rank, (6, 2)))


def reduce_scatters(rank: int, size: int) -> None:
    for n, shape in enumerate(SHAPES):
        lists = [[given(r, shape, salt=100 * d + n) for d in range(size)] for r in range(size)]
        out = torch.zeros(shape)
        dist.reduce_scatter(out, [t.clone() for t in lists[rank]])
        assert torch.equal(out, sum(lists[r][rank] for r in range(size)))
        if shape:
            whole = [torch.cat(row) for row in lists]
            dist.reduce_scatter_tensor(out, whole[rank].clone(), op=dist.ReduceOp.MAX)
            assert torch.equal(out, torch.stack([lists[r][rank] for r in range(size)]).amax(0))
            stacked = torch.stack(lists[rank])
            dist.reduce_scatter_tensor(out, stacked, op=dist.ReduceOp.AVG)
            torch.testing.assert_close(out, sum(lists[r][rank] for r in range(size)) / size)
    uneven = [[given(r, (d * 3,), salt=d) for d in range(size)] for r in range(size)]
    out = torch.zeros(rank * 3)
    dist.reduce_scatter(out, uneven[rank])
    assert torch.equal(out, sum(uneven[r][rank] for r in range(size)))
    outs = [torch.zeros(4), torch.zeros(2, 2)]
    ins = [[given(r, (4 * size,), salt=1), given(r, (2 * size, 2), salt=2)] for r in range(size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, tensor in zip(outs, ins[rank], strict=True):
            dist.reduce_scatter_tensor(out, tensor)
    manager.wait()
    for i, out in enumerate(outs):
        assert torch.equal(out, sum(ins[r][i] for r in range(size)).chunk(size)[rank])


def exchanges(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        whole = [given(r, (size * 3, 2), dtype) for r in range(size)]
        out = torch.zeros(size * 3, 2, dtype=dtype)
        dist.all_to_all_single(out, whole[rank].clone())
        assert torch.equal(out, torch.cat([whole[s].chunk(size)[rank] for s in range(size)]))
    # Rows from s to d: s * d + (s != d), none in places.
    count = [[s * d + (s != d) for d in range(size)] for s in range(size)]
    rows = [[given(s, (count[s][d], 3), salt=d) for d in range(size)] for s in range(size)]
    received = [rows[s][rank] for s in range(size)]
    out = torch.zeros(sum(len(r) for r in received), 3)
    work = dist.all_to_all_single(
        out, torch.cat(rows[rank]), [len(r) for r in received], count[rank], async_op=True
    )
    outs = [torch.zeros(count[s][rank], 3) for s in range(size)]
    later = dist.all_to_all(outs, [r.clone() for r in rows[rank]], async_op=True)
    later.wait()
    work.wait()
    assert torch.equal(out, torch.cat(received))
    assert all(torch.equal(a, b) for a, b in zip(outs, received, strict=True))
    assert work.get_future().wait()[0] is out
    big = [torch.full((300_000,), float(rank * size + d)) for d in range(size)]
    outs = [torch.empty(300_000) for _ in range(size)]
    dist.all_to_all(outs, big)
    assert [o.unique().tolist() for o in outs] == [[float(s * size + rank)] for s in range(size)]


def all_gathers(rank: int, size: int) -> None:
    uneven = [given(r, (2 * r, 3)) for r in range(size)]
    outs = [torch.zeros(2 * r, 3) for r in range(size)]
    dist.all_gather(outs, uneven[rank])
    assert all(torch.equal(a, b) for a, b in zip(outs, uneven, strict=True))
    ins = [[given(r, (3,)), given(r, (2, 2))] for r in range(size)]
    lists = [[torch.zeros_like(t) for t in ins[0]] for _ in range(size)]
    dist.all_gather_coalesced(lists, ins[rank])
    assert all(torch.equal(a, b) for x, y in zip(lists, ins, strict=True) for a, b in zip(x, y, strict=True))
    wide = [torch.zeros(3 * size), torch.zeros(2 * size, 2)]
    with dist._coalescing_manager():
        for out, tensor in zip(wide, ins[rank], strict=True):
            dist.all_gather_into_tensor(out, tensor)
    assert all(torch.equal(wide[i], torch.cat([ins[r][i] for r in range(size)])) for i in range(2))


def sparse(rank: int, size: int) -> None:
    rows = torch.tensor([[rank, 9, 3 * rank]])
    values = given(rank, (3, 4))
    tensor = torch.sparse_coo_tensor(rows, values, (20, 4))
    dist.all_reduce(tensor)
    want = sum(
        torch.sparse_coo_tensor(torch.tensor([[r, 9, 3 * r]]), given(r, (3, 4)), (20, 4)).to_dense()
        for r in range(size)
    )
    assert torch.equal(tensor.to_dense(), want)
    some = torch.sparse_coo_tensor(torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank), (5,))
    dist.all_reduce(some)
    assert some.to_dense().tolist() == [sum(range(size)), 0, 0, 0, 0]
    none = torch.sparse_coo_tensor(size=(5,))
    dist.all_reduce(none)
    assert none.to_dense().tolist() == [0] * 5
    with pytest.raises(TypeError, match="only SUM is possible, not MAX"):
        dist.all_reduce(none, op=dist.ReduceOp.MAX)


def objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "what": "x" * (1 << (4 * rank))}
    every: list[object] = [None] * size
    dist.all_gather_object(every, mine)
    assert [len(o["what"]) for o in every] == [1 << (4 * r) for r in range(size)]  # type: ignore[index]
    got: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, got, dst=1)
    assert got is None or got == every
    one: list[object] = [None]
    dist.scatter_object_list(one, every if rank == 0 else None, src=0)
    assert one == [mine]
    shared = [mine if rank == 0 else None, rank]
    dist.broadcast_object_list(shared, src=0)
    assert shared == [every[0], 0]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("what", [gathers, reduce_scatters, exchanges, all_gathers, sparse, objects])
def test_against_local_torch(pool: Pool, what, placement):
    pool.run(what, placement)


def bad_calls(rank: int, size: int) -> list[str]:
    group = dist.group.WORLD
    texts = []
    for call in (
        lambda: group.scatter([torch.zeros(2)], [], 7),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * size + 1)),
        lambda: dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1)),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [4, 4], [2, 2]),
        lambda: dist.all_to_all([torch.zeros(1)] * size, [torch.zeros(1).int()] * size),
        lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(3)),
    ):
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            texts.append(str(error))
    dist.barrier()  # nothing was sent: the group goes on
    return texts


def test_a_wrong_call_is_refused_before_anything_is_sent(pool: Pool):
    for texts in pool.run(bad_calls, [0, 1]):
        assert len(texts) == 6
        assert "invalid root rank 7" in texts[0]
        assert "must hold 4 elements of torch.float32: output (2,), input (5,)" in texts[1]
        assert "cannot be dealt out evenly to 2 ranks" in texts[2]
        assert "splits [4, 4] do not deal out 4 rows to 2 ranks" in texts[3]
        assert "output needs 6 elements and has 3" in texts[5]


def wrong_expectation(rank: int, size: int) -> str:
    out = torch.full((5 if rank == 1 else 4,), -1.0)
    splits = [3, 2] if rank == 1 else [2, 2]
    try:
        dist.all_to_all_single(out, torch.zeros(4), splits, [2, 2])
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_who_expects_other_blocks_than_it_is_sent_hears_of_both_sizes(pool: Pool):
    text = pool.run(wrong_expectation, [0, 1], timeout_s=10.0)[1]
    assert "rank 0 sent 8 bytes of float32, rank 1 called recv for 12 bytes" in text


def late(rank: int, size: int, all_ranks: bool) -> str:
    group = dist.group.WORLD
    group.monitored_barrier(datetime.timedelta(seconds=20))
    if rank in (1, 2):
        time.sleep(2.5)
        return ""
    began = time.monotonic()
    try:
        group.monitored_barrier(datetime.timedelta(seconds=1), wait_all_ranks=all_ranks)
    except dist.DistBackendError as error:
        assert time.monotonic() - began < 10
        return str(error)
    return "passed"


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_monitored_barrier_names_who_did_not_come(pool: Pool, all_ranks: bool):
    texts = pool.run(late, [0, 0, 1, 1], all_ranks)
    names = "Ranks 1, 2" if all_ranks else "Rank 1"
    assert f"[Rank 0]: {names} failed to pass monitoredBarrier in 1000 ms" in texts[0]
    assert "Rank 3 successfully reached monitoredBarrier" in texts[3]
