"""Work handles and futures, and DDP, which lives on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

import frogzmq

pytestmark = pytest.mark.torch
Machines = Callable[[int], list[Path]]


def handles(rank: int, size: int) -> None:
    import threading

    # wait again, from another thread, after shutdown; result and future
    t = torch.ones(70_000) * (rank + 1)
    work = dist.all_reduce(t, async_op=True)
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is t
    future = work.get_future()
    assert future is work.get_future()
    assert future.wait()[0] is t
    # callbacks run once, in order of ops, for every kind
    b = torch.ones(2)
    outs = [torch.zeros(1) for _ in range(size)]
    flat = torch.zeros(size)
    seen = []
    works = [
        dist.all_reduce(torch.ones(3), async_op=True),
        dist.broadcast(b, 0, async_op=True),
        dist.all_gather(outs, torch.ones(1), async_op=True),
        dist.all_gather_into_tensor(flat, torch.ones(1), async_op=True),
        dist.reduce(torch.ones(1), 0, async_op=True),
        dist.barrier(async_op=True),
    ]
    futures = [
        w.get_future().then(lambda f, i=i: seen.append((i, len(f.value())))) for i, w in enumerate(works)
    ]
    for future in futures:
        future.wait()
    assert sorted(seen) == [(0, 1), (1, 1), (2, size), (3, 1), (4, 1), (5, 0)], seen
    assert works[1].source_rank() == 0

    # a callback that waits for another collective, as PowerSGD's does
    def nested(f):
        out = dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]
        return out.item()

    assert dist.all_reduce(torch.ones(1), async_op=True).get_future().then(nested).wait() == size
    # many at once, waited for backwards
    ts = [torch.full((10,), float(i)) for i in range(200)]
    works = [dist.all_reduce(t, async_op=True) for t in ts]
    for work in reversed(works):
        work.wait()
    assert all((t == i * size).all() for i, t in enumerate(ts))
    # polled
    work = dist.all_reduce(torch.ones(1), async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert dist.group.WORLD._get_sequence_number_for_group() > 200
    dist.barrier()
    dist.destroy_process_group()
    assert work.wait()
    threads = [x.name for x in threading.enumerate() if x.name.startswith("frogzmq")]
    assert threads == []


def late_rank(rank: int, size: int) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    texts = []
    if rank == 0:
        t = torch.ones(4)
        work = dist.all_reduce(t, async_op=True)
        try:
            work.wait(timedelta(milliseconds=50))
        except dist.DistBackendError as error:
            texts.append(f"{type(error).__name__} {error}")
        begin = time.monotonic()
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        future = work.get_future()
        try:
            future.wait()
        except RuntimeError as error:
            texts.append(f"{type(error).__name__} {error}")
        try:
            work.wait()
        except frogzmq.DeadlineExceeded as error:
            texts.append(f"{type(error).__name__} {error}")
        assert time.monotonic() - begin < 10
        assert not work.is_success()
        assert isinstance(work.exception(), dist.DistBackendError)
    else:
        time.sleep(4)
        dist.all_reduce(torch.ones(4))
        try:
            # What rank 0 gave before it ran out of time still counts; its next contribution never comes.
            for _ in range(2):
                dist.all_reduce(torch.ones(4), group=group)
        except dist.DistBackendError as error:
            texts.append(f"{type(error).__name__} {error}")
    return texts


def train(rank: int, size: int, backend_args: list) -> list:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    results = []
    gloo = dist.new_group(backend="gloo")
    for case in backend_args:
        ends = []
        for group in (gloo, dist.group.WORLD):
            torch.manual_seed(7)
            model = torch.nn.Sequential(
                torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3)
            )
            ddp = DDP(
                model,
                process_group=group,
                bucket_cap_mb=0.01,
                gradient_as_bucket_view=case == "view",
                find_unused_parameters=case == "unused",
            )
            if case == "fp16":
                ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
            if case == "powersgd":
                state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            data = torch.Generator().manual_seed(rank)
            for _ in range(4):
                loss = ddp(torch.randn(8, 20, generator=data)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        torch.testing.assert_close(ends[0], ends[1], msg=lambda m, case=case: f"{case}: {m}")
        results.append(ends[1].sum().item())
    return results


def compiled(rank: int, size: int) -> float:
    from torch.profiler import ProfilerActivity, profile

    t = torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        dist.all_reduce(t)
    assert any(event.name == "frogzmq:all_reduce" for event in prof.events())
    import torch.distributed._functional_collectives as funcol

    out = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    return (out + 0).sum().item()


def test_handles(tmp_path: Path, machines: Machines) -> None:
    run_ranks(tmp_path, handles, 2, machines(1))


def test_late_rank_is_named_and_the_next_group_works(tmp_path: Path, machines: Machines) -> None:
    first, second = run_ranks(tmp_path, late_rank, 2, machines(1))
    assert first[0].startswith("DeadlineExceeded Timed out after 0.05 s: timeout while waiting for op")
    assert "rank 1" in first[0], first[0]
    assert "Timed out after 1.5 s" in first[1]
    assert first[2].startswith("DeadlineExceeded Timed out after 1.5 s")
    assert "all_reduce(SUM) of float32[4]" in first[2]
    assert second[0].startswith("RankLost"), second
    assert "rank 0" in second[0]


@pytest.mark.slow
def test_ddp_equals_gloo(tmp_path: Path, machines: Machines) -> None:
    cases = ["plain", "view", "unused", "fp16", "powersgd"]
    values = run_ranks(tmp_path, train, 2, machines(2), cases)
    assert values[0] == values[1]


def test_functional_collectives_and_profiles(tmp_path: Path, machines: Machines) -> None:
    assert run_ranks(tmp_path, compiled, 2, machines(1)) == [4.0, 4.0]
