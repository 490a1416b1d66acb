"""The variants against plain references, on real ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.torch


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = _batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def _values(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def _same_everywhere(model: nn.Module) -> bool:
    mine = torch.tensor(_values(model), dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(each, mine) for each in every)


def every_k_run(rank: int, size: int, k: int, steps: int) -> tuple[list[float], list[int], str]:
    from frogzmq.hooks import EveryKState, every_k

    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.0001)
    state = EveryKState(k)
    ddp.register_comm_hook(state, every_k)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    stepped = []
    for step in range(steps):
        optimizer.zero_grad()
        _loss(ddp, rank, step).backward()
        if state.step(optimizer):
            stepped.append(step)
        else:
            assert all(not p.grad.any() for p in ddp.parameters())
        assert _same_everywhere(ddp)
    return _values(ddp), stepped, str(state.report)


def test_every_k_is_a_step_with_a_larger_batch(pool: Pool):
    k, steps, placement = 3, 9, [0, 0, 1]
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for start in range(0, steps, k):
        optimizer.zero_grad()
        losses = [_loss(model, r, s) for r in range(3) for s in range(start, start + k)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for values, stepped, text in pool.run(every_k_run, placement, k, steps):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(_values(model)))
        assert stepped == [2, 5, 8]
        assert text.startswith("9 steps: ")
        assert text.endswith(", 0 skipped")


def fresh_run(rank: int, size: int, slow: int, steps: int) -> tuple[list[tuple], list[float], bool]:
    from frogzmq.hooks import FreshState, fresh_only

    model = _model()
    ddp = DistributedDataParallel(model)
    state = FreshState(grace_s=0.0 if slow >= 0 else 20.0, max_behind=3)
    ddp.register_comm_hook(state, fresh_only)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    first: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _loss(ddp, rank, step)
        if rank == slow:
            time.sleep(0.4)
        loss.backward()
        if not first:
            first = torch.cat([p.grad.reshape(-1) for p in ddp.parameters()]).tolist()
        optimizer.step()
    state.resync(model)
    return list(state.report.steps), first, _same_everywhere(model)


def _gradient(ranks: list[int]) -> torch.Tensor:
    model = _model()
    torch.stack([_loss(model, r, 0) for r in ranks]).mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_fresh_only_with_patience_is_the_mean_of_all(pool: Pool):
    for steps, first, same in pool.run(fresh_run, [0, 1, 1], -1, 4):
        assert [(s.used, s.skipped, s.missing) for s in steps] == [(3, 0, ())] * 4
        torch.testing.assert_close(torch.tensor(first, dtype=torch.float64), _gradient([0, 1, 2]))
        assert same


def test_fresh_only_skips_a_straggler_and_weighs_what_it_has(pool: Pool):
    slow = 2
    outcomes = pool.run(fresh_run, [0, 0, 1], slow, 6)
    for rank, (steps, first, same) in enumerate(outcomes):
        assert same, "resync makes all parameters equal"
        assert len(steps) == 6
        assert all(s.used + s.skipped == 3 and s.used >= 1 for s in steps)
        assert all(rank not in s.missing for s in steps), "the own contribution is always among them"
        ranks = [r for r in range(3) if r not in steps[0].missing]
        torch.testing.assert_close(torch.tensor(first, dtype=torch.float64), _gradient(ranks))
    for rank in (0, 1):
        assert slow in outcomes[rank][0][0].missing, "nobody waited for the straggler"


def diloco_run(rank: int, size: int, options: dict, steps: int) -> tuple[list[float], int, bool]:
    from frogzmq.diloco import DiLoCo

    model = _model()
    if rank:  # every rank starts from the first one's
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = DiLoCo(model, **options)
    for step in range(steps):
        inner.zero_grad()
        _loss(model, rank, step).backward()
        inner.step()
        outer.step()
    outer.finish()
    return _values(model), outer.report.count, _same_everywhere(model)


def _diloco_reference(size: int, steps: int, every: int, lr: float, momentum: float) -> torch.Tensor:
    anchor = torch.tensor(_values(_model()), dtype=torch.float64)
    velocity = torch.zeros_like(anchor)
    rounds = [range(a, min(a + every, steps)) for a in range(0, steps + 1, every)]
    for chosen in rounds:
        ends = []
        for rank in range(size):
            model = _model()
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
            inner = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in chosen:
                inner.zero_grad()
                _loss(model, rank, step).backward()
                inner.step()
            ends.append(torch.tensor(_values(model), dtype=torch.float64))
        gradient = anchor - torch.stack(ends).mean(0)
        velocity = momentum * velocity + gradient
        anchor = anchor - lr * (gradient + momentum * velocity)
    return anchor


def test_diloco_is_its_definition(pool: Pool):
    options = {"every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
    want = _diloco_reference(3, 7, 3, 0.7, 0.9)  # two whole rounds and the rest in finish()
    for values, rounds, same in pool.run(diloco_run, [0, 1, 1], options, 7):
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), want)
        assert rounds == 3
        assert same


def test_diloco_of_single_plain_steps_is_gradient_averaging(pool: Pool):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        torch.stack([_loss(model, r, step) for r in range(2)]).mean().backward()
        optimizer.step()
    options = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    for values, _, same in pool.run(diloco_run, [0, 1], options, 5):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(_values(model)))
        assert same


def test_diloco_that_overlaps_ends_equal_and_learns(pool: Pool):
    start = sum(float(_loss(_model(), r, 99).detach()) for r in range(2))
    for values, rounds, same in pool.run(diloco_run, [0, 1], {"every": 4, "overlap": True}, 40):
        assert same
        assert rounds == 11
        model = _model()
        nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float64), model.parameters())
        assert sum(float(_loss(model, r, 99).detach()) for r in range(2)) < start / 2


def test_bad_settings_are_refused_by_value():
    from frogzmq.diloco import DiLoCo
    from frogzmq.hooks import EveryKState, FreshState

    with pytest.raises(ValueError, match="not 0"):
        EveryKState(0)
    with pytest.raises(ValueError, match=r"not -1 and 4"):
        FreshState(object(), grace_s=-1)
    with pytest.raises(ValueError, match=r"not 0, 0\.7 and 0\.9"):
        DiLoCo(nn.Linear(1, 1), every=0)
