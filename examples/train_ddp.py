"""Train a classifier on the UCI digits (scikit-learn ships them) with DistributedDataParallel.

::

    torchrun --nproc-per-node 4 examples/train_ddp.py
    torchrun --nproc-per-node 4 examples/train_ddp.py --backend gloo

or start each rank by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, or with
``--init file:///shared/path`` and RANK and WORLD_SIZE set. Every run with the same seed, ranks and fold
order ends with the same parameters, bit for bit, and so does every rank of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

TRAIN_ROWS = 1500
"""Of 1797; the other 297 are held out."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="frogzmq", help="frogzmq (default) or gloo")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="rows per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=256, help="width of the first hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bucket-view", action=argparse.BooleanOptionalAction, default=True,
                        help="gradient_as_bucket_view of DistributedDataParallel")  # fmt: skip
    parser.add_argument("--init", default="env://", help="env:// (default), file:///path or tcp://host:port")
    parser.add_argument("--json", metavar="FILE", help="write the outcome; {rank}: every rank writes its own")
    args = parser.parse_args()
    if args.epochs < 0 or args.batch < 1 or args.hidden < 2:
        parser.error("--epochs must be 0 or more, --batch 1 or more, --hidden 2 or more")
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        parser.error(f"{' and '.join(missing)} not set: start this with torchrun, or set them for each rank")
    return args


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pixels (1500, 64) scaled to 0..1 and labels, then held-out ones; the same on every rank."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pixels, labels = pixels[order], labels[order]
    return pixels[:TRAIN_ROWS], labels[:TRAIN_ROWS], pixels[TRAIN_ROWS:], labels[TRAIN_ROWS:]


def make_model(hidden: int, seed: int) -> nn.Module:
    """A small multilayer perceptron, the same on every rank.

    Smooth activations: at the kink of a ReLU the last bit of a sum can decide whether a unit learns, so that
    two backends which add in different orders would end measurably apart.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, hidden),
        nn.GELU(),
        nn.Linear(hidden, hidden // 2),
        nn.GELU(),
        nn.Linear(hidden // 2, 10),
    )


def evaluate(model: nn.Module, pixels: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy over the held-out rows: each rank does its share, all get the same answer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine_x, mine_y = pixels[rank::size], labels[rank::size]
    with torch.no_grad():
        scores = model(mine_x)
        loss = nn.functional.cross_entropy(scores, mine_y, reduction="sum").double()
        right = (scores.argmax(1) == mine_y).sum().double()
    total = torch.stack([loss, right])
    dist.all_reduce(total)
    return total[0].item() / len(labels), total[1].item() / len(labels)


def parameter_hash(model: nn.Module) -> str:
    """BLAKE3 over the bytes of all parameters, in order, as hex."""
    hasher = blake3()
    for parameter in model.parameters():
        hasher.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def gather_hashes(digest: str) -> list[str]:
    """Every rank's hash, on every rank."""
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    return [bytes(row.tolist()).hex() for row in all_ranks]


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train and return the outcome. Rank 0 prints a line per epoch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = load_data(args.seed)
    model = make_model(args.hidden, args.seed)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=args.bucket_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(range(len(train_y)), size, rank, shuffle=True, seed=args.seed)  # type: ignore[arg-type]
    began, steps, loss = time.perf_counter(), 0, torch.zeros(())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(args.batch):
            loss = nn.functional.cross_entropy(ddp(train_x[rows]), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        if rank == 0:
            elapsed = time.perf_counter() - began
            print(
                f"epoch {epoch + 1}/{args.epochs}  step {steps}  loss {loss.item():.4f}  {elapsed:.1f} s",
                flush=True,
            )
    elapsed = time.perf_counter() - began
    held_out, accuracy = evaluate(model, test_x, test_y)
    digest = parameter_hash(model)
    return {
        "backend": args.backend, "rank": rank, "world_size": size, "epochs": args.epochs, "steps": steps,
        "bucket_view": args.bucket_view, "elapsed_s": elapsed, "held_out_loss": held_out,
        "accuracy": accuracy, "parameter_hash": digest, "hashes": gather_hashes(digest),
    }  # fmt: skip


def report(outcome: dict[str, object], rank: int) -> bool:
    """Print the outcome on rank 0; True where every rank ended with the same parameters."""
    hashes = outcome["hashes"]
    assert isinstance(hashes, list)
    equal = len(set(hashes)) == 1
    if rank == 0:
        print(f"held-out loss {outcome['held_out_loss']:.6f}  accuracy {outcome['accuracy']:.4f}  "
              f"{outcome['steps']} steps in {outcome['elapsed_s']:.2f} s")  # fmt: skip
        for index, digest in enumerate(hashes):
            print(f"rank {index} parameters {digest[:16]}")
        print("all ranks hold the same parameters" if equal else "RANKS DIFFER", flush=True)
    return equal


def main() -> int:
    """Train; 1 when ranks end with different parameters."""
    args = parse()
    torch.set_num_threads(1)
    if args.backend == "frogzmq":
        import frogzmq  # noqa: F401  registers the backend; the one-line change to a script
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(args.backend, init_method=args.init, rank=rank, world_size=size)
    try:
        outcome = train(args)
        if args.json and (rank == 0 or "{rank}" in args.json):
            Path(args.json.replace("{rank}", str(rank))).write_text(json.dumps(outcome, indent=1) + "\n")
        equal = report(outcome, rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
