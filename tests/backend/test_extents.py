"""Large and unusual extents: beyond 2 and 4 GiB, large objects, stacked outputs, uneven placements."""

from __future__ import annotations

import resource
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch


# -------------------------------------------------------------------- C045: stacked or concatenated
def layouts(rank: int, size: int) -> None:
    for shape in ((4,), (3, 5), (2, 3, 4), ()):
        every = [torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * r for r in range(size)]
        stacked = torch.empty(size, *shape)
        dist.all_gather_into_tensor(stacked, every[rank])
        assert torch.equal(stacked, torch.stack(every))
        flat = torch.empty(stacked.numel())
        dist.all_gather_into_tensor(flat, every[rank])
        assert torch.equal(flat, stacked.view(-1))
        if shape:
            joined = torch.empty(size * shape[0], *shape[1:])
            dist.all_gather_into_tensor(joined, every[rank])
            assert torch.equal(joined, torch.cat(every))
    gaps = torch.zeros(4, 2 * size)[:, ::2]
    with pytest.raises(ValueError, match=r"must be contiguous.*\(4, 3\).*\(4,\)"):
        dist.all_gather_into_tensor(gaps, torch.ones(4))
    small = torch.zeros(size, 3)
    with pytest.raises(ValueError, match=r"needs 12 elements and has 9: output \(3, 3\), input \(4,\)"):
        dist.all_gather_into_tensor(small, torch.ones(4))
    assert not gaps.any()
    assert not small.any()
    dist.barrier()


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 1]], ids=str)
def test_c045_stacked_and_concatenated_outputs(pool: Pool, placement: list[int]) -> None:
    pool.run(layouts, placement)


# -------------------------------------------------------------------- C035: 1, 2 and 3 ranks a machine
def everything(rank: int, size: int) -> None:
    for count in (1, 1000, 100_003):
        every = [torch.arange(float(count)) + r for r in range(size)]
        total = torch.stack(every).sum(0)
        tensor = every[rank].clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        for root in range(size):
            tensor = every[rank].clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, every[root])
        tensor = every[rank].clone()
        dist.reduce(tensor, 3)
        assert torch.equal(tensor, total if rank == 3 else every[rank])
        outs = [torch.empty(count) for _ in range(size)]
        dist.all_gather(outs, every[rank])
        assert all(map(torch.equal, outs, every))
        at_root = [torch.empty(count) for _ in range(size)] if rank == 1 else None
        dist.gather(every[rank], at_root, 1)
        assert at_root is None or all(map(torch.equal, at_root, every))
        dist.scatter(tensor, every if rank == 5 else None, 5)
        assert torch.equal(tensor, every[rank])
        dist.reduce_scatter(tensor, [every[rank] + d for d in range(size)])
        assert torch.equal(tensor, total + size * rank)
        dist.all_to_all(outs, [every[rank] + 10 * d for d in range(size)])
        assert all(torch.equal(out, every[s] + 10 * rank) for s, out in enumerate(outs))
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        sent = dist.isend(every[rank], ahead)
        dist.recv(tensor, behind)
        sent.wait()
        assert torch.equal(tensor, every[behind])
    dist.barrier()


@pytest.mark.parametrize("placement", [[0, 1, 1, 2, 2, 2], [2, 1, 2, 0, 1, 2]], ids=str)
def test_c035_one_two_and_three_ranks_a_machine(pool: Pool, placement: list[int]) -> None:
    pool.run(everything, placement)


# -------------------------------------------------------------------- C082: large objects
def objects(rank: int, size: int, count: int) -> tuple[float, float]:
    """Seconds for the object and for its bytes as a tensor."""
    content = {f"layer{n}": torch.full((count // 40,), float(n)) for n in range(10)}
    raw = torch.empty(count, dtype=torch.uint8)
    dist.broadcast(raw, 0)
    begin = time.monotonic()
    dist.broadcast(raw, 0)
    plain = time.monotonic() - begin
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    box: list[object] = [content if rank == 0 else None]
    dist.barrier()
    begin = time.monotonic()
    dist.broadcast_object_list(box, 0)
    seconds = time.monotonic() - begin
    got = box[0]
    assert isinstance(got, dict)
    assert all(torch.equal(got[name], tensor) for name, tensor in content.items())
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert extra < 6 * count, extra  # torch's own pickling and unpickling hold it several times
    sizes = [1, 1000, count][:size]
    every: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object(b"x" * sizes[rank], every, 0)
    assert every is None or [len(each) for each in every] == sizes  # type: ignore[arg-type]
    return seconds, plain


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 2]], ids=str)
def test_c082_large_objects(pool: Pool, placement: list[int]) -> None:
    pool.run(objects, placement, 20_000_000)


# -------------------------------------------------------------------- C064: beyond 2 and 4 GiB
def huge(rank: int, size: int, count: int) -> None:
    tensor = torch.zeros(count, dtype=torch.uint8)
    near = {m for border in (0, 1 << 31, 1 << 32, count) for m in range(border - 2, border + 2)}
    marks = sorted(mark for mark in near if 0 <= mark < count)
    if rank == 0:
        for n, mark in enumerate(marks):
            tensor[mark] = n + 1
    dist.broadcast(tensor, 0)
    assert [int(tensor[mark]) for mark in marks] == list(range(1, len(marks) + 1))
    assert int(torch.count_nonzero(tensor)) == len(marks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("exhaustive")
@pytest.mark.parametrize("count", [(1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) + 5])
def test_c064_broadcast_around_2_and_4_gib(pool: Pool, count: int) -> None:
    if psutil.virtual_memory().available < 5 * count:
        pytest.skip("both tensors, and what each side's peer holds of them, do not fit into memory")
    pool.run(huge, [0, 1], count, timeout_s=400.0, deadline_s=450.0)
