"""The backend as scripts use it: handles with futures, names and device maps, object collectives."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

import frogzmq

pytestmark = pytest.mark.torch
R = dist.ReduceOp


# -------------------------------------------------------------------- C039: futures
def collectives(rank: int, size: int, count: int, source: int = 1) -> dict:
    """Every collective: how it is called, and the outputs that its future must hold."""
    total, ranks = sum(range(size)), range(size)

    def full(value: float, n: int = count) -> torch.Tensor:
        return torch.full((n,), float(value))

    lists, flat = [full(-1) for _ in ranks], full(-1, size * count)
    t = [full(rank) for _ in range(4)]
    stacked = torch.arange(float(size)).repeat_interleave(count)
    return {
        "all_reduce": (lambda g: dist.all_reduce(t[0], group=g, async_op=True), [full(total)]),
        "avg": (lambda g: dist.all_reduce(t[1], R.AVG, group=g, async_op=True), [full(total / size)]),
        "broadcast": (lambda g: dist.broadcast(t[2], source, group=g, async_op=True), [full(source)]),
        "reduce": (
            lambda g: dist.reduce(t[3], 0, R.MAX, group=g, async_op=True),
            [full(size - 1 if rank == 0 else rank)],
        ),
        "all_gather": (
            lambda g: dist.all_gather(lists, full(rank), group=g, async_op=True), [full(r) for r in ranks],
        ),
        "into": (lambda g: dist.all_gather_into_tensor(flat, full(rank), group=g, async_op=True), [stacked]),
        "barrier": (lambda g: dist.barrier(group=g, async_op=True), []),
    }  # fmt: skip


def futures(rank: int, size: int, count: int) -> None:
    seen: list[tuple[str, bool]] = []
    works, chained = {}, []
    for name, (call, want) in collectives(rank, size, count).items():

        def look(future, name=name, want=want) -> int:
            values = future.value()
            same = len(values) == len(want) and all(map(torch.equal, values, want))
            seen.append((name, same))
            return len(values)

        works[name] = work = call(None)
        chained.append((name, work.get_future().then(look).then(lambda f: f.value() + 100), len(want)))
    for name, future, length in chained:
        assert future.wait() == length + 100, name
    assert sorted(seen) == sorted((name, True) for name in works)  # each once, with the right values
    for name, work in works.items():
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name
        assert work.wait(), name
        assert len(work.result()) == len(work.get_future().value()), name
    # Of coalesced ones torch gives the future itself.
    pair = [torch.full((count,), float(rank)), torch.full((2,), float(rank))]
    future = dist.all_reduce_coalesced(pair, async_op=True)
    assert all((out == sum(range(size))).all() for out in future.wait())
    late = []  # a callback on something long done runs too, once
    works["all_reduce"].get_future().then(lambda f: late.append(f.value()[0][0].item())).wait()
    assert late == [sum(range(size))]


def failing_futures(rank: int, size: int) -> list[str]:
    """The last rank leaves; every collective of the others fails, through every way of asking."""
    texts = []
    for name, (call, _) in collectives(rank, size, 1000, source=size - 1).items():
        group = dist.new_group(timeout=timedelta(seconds=20))
        if rank == size - 1:
            dist.barrier()
            dist.destroy_process_group(group)
            continue
        work = call(group)
        runs = []
        future = work.get_future().then(lambda f, runs=runs: runs.append(1) or f.value())
        dist.barrier()
        if name == "reduce" and rank != 0:
            continue  # it has given what the root needs of it, and gets nothing
        with pytest.raises(RuntimeError, match=f"rank {size - 1}"):
            future.wait()
        assert runs == [1], name
        assert work.is_completed(), name
        assert not work.is_success(), name
        assert isinstance(work.exception(), frogzmq.RankLost), name
        for ask in (work.wait, work.result):
            with pytest.raises(dist.DistBackendError):
                ask()
        texts.append(name)
    return texts


@pytest.mark.parametrize("count", [3, 50_000])
@pytest.mark.parametrize("placement", [[0, 0], [0, 1, 0]])
def test_c039_every_collective_has_a_future(pool: Pool, placement: list[int], count: int) -> None:
    pool.run(futures, placement, count)


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 2]])
def test_c039_failures_reach_futures(pool: Pool, placement: list[int]) -> None:
    first, second, _ = pool.run(failing_futures, placement)
    assert first == ["all_reduce", "avg", "broadcast", "reduce", "all_gather", "into", "barrier"]
    assert set(first) - set(second) == {"reduce"}


def zero_and_hook(rank: int, size: int) -> float:
    """DDP with a hook on futures and ZeroRedundancyOptimizer: ten steps, equal to Gloo's bit by bit."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    def hook(group, bucket):
        work = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ends = []
    for group in (dist.new_group(backend="gloo"), dist.group.WORLD):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(10, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)]
        model = DDP(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.005)
        model.register_comm_hook(group, hook)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        data = torch.Generator().manual_seed(rank)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 10, generator=data)).square().mean().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(0) if group is not dist.group.WORLD else None
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*ends)
    return float(ends[1].double().sum())


@pytest.mark.parametrize("placement", [[0, 0], [0, 1]])
def test_c039_ddp_hook_and_zero_optimizer_equal_gloo(pool: Pool, placement: list[int]) -> None:
    sums = pool.run(zero_and_hook, placement)
    assert sums[0] == sums[1]


# ------------------------------------------------------------------- C041: names and maps
def named(rank: int, size: int, backend: str, delay_s: float) -> float:
    # torch gives back what was written; so it does for its own backends.
    assert dist.get_backend() == backend
    other = dist.new_group(backend=backend.replace("frogzmq", "gloo"))
    assert dist.get_backend(other) == backend.replace("frogzmq", "gloo")
    assert dist.group.WORLD.name() == "frogzmq"
    t = torch.full((4,), float(rank))
    dist.all_reduce(t)
    assert (t == sum(range(size))).all()
    got: list = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * (rank * 1000)})
    assert [g["rank"] for g in got] == list(range(size))
    sent = [{"from": 1}, "b"] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, src=1)
    assert sent == [{"from": 1}, "b"]
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    t = torch.ones(1)
    dist.all_reduce(t, group=gloo)
    assert t.item() == size
    dist.barrier(group=gloo)
    dist.barrier()
    before = dist.group.WORLD._get_sequence_number_for_group()
    if rank == 1:
        time.sleep(delay_s)
    begin = time.monotonic()
    dist.barrier()
    waited = time.monotonic() - begin
    assert dist.group.WORLD._get_sequence_number_for_group() == before + 1  # it was ours
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroup)
    return waited


@pytest.mark.parametrize("backend", ["frogzmq", "cpu:frogzmq", "cpu:frogzmq,cuda:frogzmq"])
@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 0]])
def test_c041_names_maps_and_a_barrier_that_waits(pool: Pool, backend: str, placement: list[int]) -> None:
    delay_s = 5.0 if backend == "frogzmq" else 1.0
    first, _, third = pool.run(named, placement, backend, delay_s, backend=backend)
    assert min(first, third) >= delay_s - 0.05  # rank 1 may have left the barrier before a little earlier


def misnamed(rank: int, size: int, folder: str) -> list[str]:
    texts = []
    for backend in ("frogzmk", "cpu:frogzmq,cuda:frogzmk"):
        with pytest.raises((AssertionError, frogzmq.ConfigError), match="frogzmk") as caught:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/{len(texts)}", rank=rank, world_size=size
            )
        texts.append(str(caught.value))
        assert not dist.is_initialized()
    return texts


def test_c041_a_typo_in_the_name_is_a_clear_error(pool: Pool, tmp_path) -> None:
    for texts in pool.run(misnamed, [0, 0], str(tmp_path), init=False):
        assert all("frogzmk" in text for text in texts), texts


def mixed(rank: int, size: int, folder: str) -> str:
    with pytest.raises(frogzmq.ConfigError) as caught:
        dist.init_process_group(
            "cpu:gloo,cuda:frogzmq", init_method=f"file://{folder}/mixed", rank=rank, world_size=size
        )
    return str(caught.value)


def test_c041_a_map_with_other_backends_is_refused_with_what_to_do(pool: Pool, tmp_path) -> None:
    (text,) = pool.run(mixed, [0], str(tmp_path), init=False)
    assert "cpu:gloo,cuda:frogzmq" in text
    assert "new_group(backend=" in text
