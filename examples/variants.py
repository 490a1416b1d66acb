"""Loss against wall time where one rank is slow: DDP's meaning beside the variants that change it on purpose.

::

    torchrun --nproc-per-node 3 examples/variants.py
    torchrun --nproc-per-node 3 examples/variants.py --slow 0.05 --steps 200

Trains the UCI digits four times, the last rank sleeping before every backward pass. The table's first row is
plain DDP; the others (``fresh_only``, ``every_k``, DiLoCo) are other algorithms, and say what they left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_ddp import evaluate, load_data, make_model

import frogzmq  # noqa: F401  registers the backend
from frogzmq.diloco import DiLoCo
from frogzmq.hooks import EveryKState, FreshState, every_k, fresh_only


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--slow", type=float, default=0.02, help="seconds that the last rank loses per step")
    parser.add_argument("--k", type=int, default=4, help="steps per exchange of every_k")
    parser.add_argument("--every", type=int, default=20, help="inner steps per round of DiLoCo")
    return parser.parse_args()


Step = Callable[[nn.Module, int], Tensor]


def ddp(args: argparse.Namespace, model: nn.Module, loss_of: Step) -> str:
    """What everything else is measured against."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
    return "every contribution in every step"


def fresh(args: argparse.Namespace, model: nn.Module, loss_of: Step) -> str:
    """A step uses what has arrived."""
    wrapped = DistributedDataParallel(model)
    state = FreshState()
    wrapped.register_comm_hook(state, fresh_only)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
    state.resync(model)
    return str(state.report)


def every(args: argparse.Namespace, model: nn.Module, loss_of: Step) -> str:
    """Gradients of k steps in one exchange."""
    wrapped = DistributedDataParallel(model)
    state = EveryKState(args.k)
    wrapped.register_comm_hook(state, every_k)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=args.lr, momentum=0.9)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        state.step(optimizer)
    return str(state.report)


def diloco(args: argparse.Namespace, model: nn.Module, loss_of: Step) -> str:
    """Local steps, then one outer step."""
    inner = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    outer = DiLoCo(model, every=args.every, overlap=True)
    for step in range(args.steps):
        inner.zero_grad()
        loss_of(model, step).backward()
        inner.step()
        outer.step()
    outer.finish()
    return str(outer.report)


def run(name: str, train: Callable[..., str], args: argparse.Namespace) -> None:
    """Train once from the same start; rank 0 prints the row."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = load_data(0)
    model = make_model(128, 0)

    def loss_of(net: nn.Module, step: int) -> Tensor:
        seed = torch.Generator().manual_seed(step * size + rank)
        rows = torch.randint(len(train_y), (args.batch,), generator=seed)
        loss = nn.functional.cross_entropy(net(train_x[rows]), train_y[rows])
        if rank == size - 1:
            time.sleep(args.slow)
        return loss

    dist.barrier()
    began = time.perf_counter()
    note = train(args, model, loss_of)
    mine = time.perf_counter() - began
    loss, accuracy = evaluate(model, test_x, test_y)
    if rank == 0:
        print(f"{name:<16}{mine:>8.2f} s{loss:>10.4f}{accuracy:>10.4f}  {note}", flush=True)


def main() -> None:
    """All four, one after the other."""
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("frogzmq")
    if dist.get_rank() == 0:
        print(f"{'':<16}{'rank 0':>10}{'held-out':>10}{'accuracy':>10}  contributions, as rank 0 saw them")
    run("DDP", ddp, args)
    run("fresh_only *", fresh, args)
    run(f"every_k({args.k}) *", every, args)
    run(f"DiLoCo({args.every}) *", diloco, args)
    if dist.get_rank() == 0:
        print("* another algorithm than DDP, on purpose")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
