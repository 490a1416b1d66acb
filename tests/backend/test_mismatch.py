"""Ranks that call different things: an error on every rank that names both, and nothing is touched."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

import frogzmq

pytestmark = pytest.mark.torch
R = dist.ReduceOp
LIMIT_S = 10.0
ONE_SIDED = ("roots", "transposed shape", "kinds")


def unequal_calls(rank: int, odd: bool) -> dict[str, tuple]:
    """Name: (tensors that must stay as they are, the call in a group); the ``odd`` rank differs."""

    def full(shape, dtype=torch.float32):
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype) + rank

    calls = {}
    t = full((200 if odd else 100, 2560))
    calls["shapes"] = ([t], lambda g, t=t: dist.all_reduce(t, group=g))
    t = full((4,), torch.float64) if odd else full((8,))
    calls["equal bytes"] = ([t], lambda g, t=t: dist.all_reduce(t, group=g))
    n = 5 if odd else 3
    t, outs = full((n,)), [full((n,)) for _ in range(dist.get_world_size())]
    calls["all_gather"] = ([t, *outs], lambda g, t=t, outs=outs: dist.all_gather(outs, t, group=g))
    n = 300_000 if odd else 400_000
    t, out = full((n,)), full((n * dist.get_world_size(),))
    calls["large all_gather"] = (
        [t, out],
        lambda g, t=t, out=out: dist.all_gather_into_tensor(out, t, group=g),
    )
    t = full((6,))
    calls["ops"] = ([t], lambda g, t=t: dist.all_reduce(t, R.MAX if odd else R.SUM, group=g))
    t = full((6,))
    calls["roots"] = ([t], lambda g, t=t: dist.broadcast(t, int(odd), group=g))
    t = full((3, 2) if odd else (2, 3))
    calls["transposed shape"] = ([t], lambda g, t=t: dist.reduce(t, 0, group=g))
    t = full((2_000_000,))
    calls["kinds"] = (
        [t], lambda g, t=t: dist.broadcast(t, 1, group=g) if odd else dist.all_reduce(t, group=g)
    )  # fmt: skip
    t = full((6,))
    calls["barrier"] = ([t], lambda g, t=t: dist.barrier(group=g) if odd else dist.all_reduce(t, group=g))
    t = full((0,) if odd else (6,))
    calls["empty"] = ([t], lambda g, t=t: dist.all_reduce(t, group=g))
    return calls


def call_and_go_on(name: str, call, group) -> None:
    """Who only gives (a broadcast's source) need not wait for the others: its next call raises."""
    call(group)
    assert name in ONE_SIDED, name
    dist.barrier(group=group)


def disagree(rank: int, size: int, mode: str) -> dict[str, str]:
    """The last rank differs. Return the texts of the errors."""
    texts = {}
    for name, (tensors, call) in unequal_calls(rank, odd=rank == size - 1).items():
        group = dist.new_group(pg_options=frogzmq.Options(mode=mode))
        before = [tensor.clone() for tensor in tensors]
        begin = time.monotonic()
        with pytest.raises(frogzmq.Mismatch) as caught:
            call_and_go_on(name, call, group)
        assert isinstance(caught.value, dist.DistBackendError)
        assert time.monotonic() - begin < LIMIT_S, name
        texts[name] = str(caught.value)
        if name != "roots" or rank in (0, size - 1):  # others have what their root gave them
            assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), f"{name}: touched"
        with pytest.raises(frogzmq.FrogError):  # the group is broken, for good
            dist.all_reduce(torch.ones(3), group=group)
        fresh = dist.new_group(pg_options=frogzmq.Options(mode=mode))
        t = torch.full((100, 2), float(rank))
        dist.all_reduce(t, group=fresh)
        assert (t == sum(range(size))).all(), name
        dist.destroy_process_group(group)
    return texts


@pytest.mark.parametrize("mode", ["faithful", "shard", "auto"])
@pytest.mark.parametrize("placement", [[0, 0], [0, 1], [0, 1, 0], [0, 0, 1, 2]])
def test_c027_ranks_that_differ_are_named_on_every_rank(pool: Pool, placement: list[int], mode: str) -> None:
    last = len(placement) - 1
    sides = {
        "shapes": ("float32[100, 2560]", "float32[200, 2560]"),
        "equal bytes": ("float32[8]", "float64[4]"),
        "all_gather": ("float32[3]", "float32[5]"),
        "large all_gather": ("float32[400000]", "float32[300000]"),
        "ops": ("all_reduce(SUM)", "all_reduce(MAX)"),
        "roots": ("root 0", "root 1"),
        "transposed shape": ("float32[2, 3]", "float32[3, 2]"),
        "kinds": ("all_reduce(SUM) of float32[2000000]", "broadcast of float32[2000000] root 1"),
        "barrier": ("all_reduce(SUM)", "barrier"),
        "empty": ("float32[6]", "float32[0]"),
    }
    for rank, texts in enumerate(pool.run(disagree, placement, mode, timeout_s=12.0)):
        assert list(texts) == list(sides)
        for name, text in texts.items():
            assert all(side in text for side in sides[name]), f"rank {rank}, {name}: {text}"
            assert f"rank {last}" in text, f"rank {rank}, {name}: {text}"


def disagree_then_live(rank: int, size: int) -> str:
    """An op before the bad one still completes; futures and handles carry the error."""
    group = dist.new_group()
    good = torch.full((50_000,), rank + 1.0)
    bad = torch.ones(10 + (rank == size - 1))
    first = dist.all_reduce(good, group=group, async_op=True)
    second = dist.all_reduce(bad, group=group, async_op=True)
    future = second.get_future()
    with pytest.raises(RuntimeError, match="Mismatch|called"):
        future.wait()
    assert second.is_completed()
    assert isinstance(second.exception(), frogzmq.Mismatch)
    with pytest.raises(frogzmq.Mismatch):
        second.result()
    assert first.wait()
    assert (good == sum(range(1, size + 1))).all()
    assert (bad == 1).all()
    return str(second.exception())


@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 2]])
def test_c027_what_came_before_still_completes(pool: Pool, placement: list[int]) -> None:
    for text in pool.run(disagree_then_live, placement):
        assert "float32[10]" in text
        assert "rank 2 called all_reduce(SUM) of float32[11]" in text


def late_receiver(rank: int, size: int, count: int) -> str:
    """The source of a broadcast has gone on long since when the other rank calls with another shape."""
    group = dist.new_group()
    if rank == size - 1:
        time.sleep(0.5)
        t = torch.full((count + 1,), -1.0)
        with pytest.raises(frogzmq.Mismatch) as caught:
            dist.broadcast(t, 0, group=group)
        assert (t == -1).all()
        return str(caught.value)

    def give_and_go_on() -> None:
        dist.broadcast(torch.ones(count), 0, group=group)
        dist.barrier(group=group)

    with pytest.raises(frogzmq.Mismatch) as caught:
        give_and_go_on()
    return str(caught.value)


@pytest.mark.parametrize("count", [5, 100_000])
@pytest.mark.parametrize("placement", [[0, 0], [0, 1], [0, 1, 2]])
def test_c027_a_broadcast_that_is_over_at_its_source(pool: Pool, placement: list[int], count: int) -> None:
    for text in pool.run(late_receiver, placement, count, timeout_s=12.0):
        assert f"broadcast of float32[{count}] root 0" in text
        assert f"rank {len(placement) - 1} called broadcast of float32[{count + 1}] root 0" in text
