"""What torch builds on collectives, over Gloo and over the fabric: the same outcome."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.torch, pytest.mark.ecosystem, pytest.mark.timeout(300)]
STEPS = 5


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 33), nn.GELU(), nn.Linear(33, 3))


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    x = torch.randn(8, 32, generator=generator)
    return nn.functional.mse_loss(net(x), x[:, :3].sin())


def flat(parameters) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in parameters]).tolist()


def with_ddp(rank: int, size: int) -> list[float]:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    return flat(ddp.parameters())


def with_fully_shard(rank: int, size: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    return flat(p.full_tensor() for p in net.parameters())


def with_fsdp1(rank: int, size: int) -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(net):
        return flat(net.parameters())


def with_zero(rank: int, size: int) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    return flat(ddp.parameters())


@pytest.fixture(scope="module")
def reference(pool: Pool) -> list[float]:
    return pool.run(with_ddp, [0, 0, 1], backend="gloo")[0]


@pytest.mark.parametrize(
    "train", [with_ddp, with_fully_shard, with_fsdp1, with_zero], ids=lambda f: f.__name__
)
def test_c043_sharded_training_equals_ddp(
    pool: Pool, reference: list[float], train: Callable[..., list[float]]
):
    for values in pool.run(train, [0, 1, 1], deadline_s=200.0):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(reference), atol=1e-5, rtol=1e-5)


def uneven_batches(rank: int, size: int, join: bool) -> str | list[float]:
    from torch.distributed.algorithms.join import Join

    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    batches = 6 + 2 * rank

    def train() -> None:
        for step in range(batches):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()

    if join:
        with Join([ddp]):
            train()
        return flat(ddp.parameters())
    try:
        train()
    except RuntimeError as error:
        return str(error)
    dist.destroy_process_group()
    return ""


def test_c015_uneven_batches_join(pool: Pool):
    ours = pool.run(uneven_batches, [0, 1], True)
    theirs = pool.run(uneven_batches, [0, 1], True, backend="gloo")
    assert ours[0] == ours[1]
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), atol=1e-6, rtol=1e-5)


def test_c015_without_join_the_waiting_rank_hears_who_left(pool: Pool):
    texts = pool.run(uneven_batches, [0, 1], False, timeout_s=20.0)
    assert texts[0] == ""
    assert "rank 0" in texts[1]
    assert "left" in texts[1]


def unused(rank: int, size: int, detect: bool) -> list[float] | str:
    """C025: a branch that is used on odd steps only, and on rank 1 only."""
    torch.manual_seed(1)
    one, two = nn.Linear(4, 2), nn.Linear(4, 2)

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
            return self.one(x) + self.two(x) if second else self.one(x)

    ddp = DistributedDataParallel(Branching(), find_unused_parameters=detect)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        for step in range(20):
            optimizer.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(x, step % 2 == 1 and rank == 1).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return type(error).__name__
    return flat(ddp.parameters())


@pytest.mark.parametrize("detect", [True, False])
def test_c025_parameters_without_gradient(pool: Pool, detect: bool):
    ours = pool.run(unused, [0, 1], detect)
    theirs = pool.run(unused, [0, 1], detect, backend="gloo")
    if detect:
        assert ours[0] == ours[1]
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), atol=1e-6, rtol=1e-6)
    else:
        assert ours == theirs
        assert "RuntimeError" in ours


def checkpoint(rank: int, size: int, folder: str, write: bool) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    if not write:
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    state = get_model_state_dict(net)
    if write:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(net, state)
    return flat(p.full_tensor() for p in net.parameters())


def test_c043_a_checkpoint_of_three_ranks_is_read_by_two(pool: Pool):
    with tempfile.TemporaryDirectory() as folder:
        written = pool.run(checkpoint, [0, 1, 1], folder, True, deadline_s=120.0)
        assert list(Path(folder).glob("*.distcp"))
        read = pool.run(checkpoint, [0, 1], folder, False, deadline_s=120.0)
    assert read == [written[0]] * 2
    assert written[0] == flat(model().parameters())


def tensor_parallel(rank: int, size: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    x = torch.randn(5, 8)
    want = net(x)
    split = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(split(x), want)
    spread = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    return (spread.redistribute(placements=[Shard(1)]).full_tensor() + 1).sum().reshape(1).tolist()


def test_tensor_parallel_and_dtensor(pool: Pool):
    assert pool.run(tensor_parallel, [0, 1]) == [[300.0]] * 2


def functional(rank: int, size: int, compiled: bool) -> list[float]:
    import torch.distributed._functional_collectives as funcol

    def step(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        every = funcol.all_gather_tensor(total + rank, 0, dist.group.WORLD)
        return funcol.reduce_scatter_tensor(every, "sum", 0, dist.group.WORLD) + 1

    call = torch.compile(step, backend="eager", fullgraph=True) if compiled else step
    return call(torch.tensor([1.0, 2.0]) + rank).tolist()


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_collectives(pool: Pool, compiled: bool):
    # sum of 2x = [6, 10]; gathered with + r; slice r summed over ranks: 2 * (6 + r, 10 + r); then + 1
    want = [[13.0, 21.0], [15.0, 23.0]]
    assert pool.run(functional, [0, 1], compiled, deadline_s=200.0) == want


def embeddings(rank: int, size: int, sparse: bool, disjoint: bool) -> list[float]:
    torch.manual_seed(0)
    net = nn.Embedding(300, 8, sparse=sparse)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for step in range(10):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 10 + rank)
        rows = torch.randint(0, 150, (7 + rank,), generator=generator) + (150 * rank if disjoint else 0)
        ddp(rows).square().sum().backward()
        optimizer.step()
    return flat(net.parameters())


@pytest.mark.parametrize("disjoint", [False, True])
def test_c066_sparse_gradients_equal_dense_ones(pool: Pool, disjoint: bool):
    dense = pool.run(embeddings, [0, 1], False, disjoint)
    sparse = pool.run(embeddings, [0, 1], True, disjoint)
    assert sparse[0] == sparse[1]
    torch.testing.assert_close(torch.tensor(sparse[0]), torch.tensor(dense[0]), atol=1e-6, rtol=1e-6)
