"""The smallest job: every rank gives a tensor, all_reduce sums them, every rank checks the sum.

::

    torchrun --nproc-per-node 2 examples/allreduce.py
    torchrun --nproc-per-node 2 examples/allreduce.py --backend gloo
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist


def main() -> int:
    """Run one collective and check it; 1 when the sum is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="frogzmq", help="frogzmq (default), gloo, ...")
    parser.add_argument("--elements", type=int, default=1_000_000, help="float32 elements in the tensor")
    parser.add_argument("--init", default="env://", help="env:// (default), tcp://host:port or file:///path")
    args = parser.parse_args()
    if args.backend == "frogzmq":
        import frogzmq  # noqa: F401  registers the backend; the one-line change to a script

    dist.init_process_group(args.backend, init_method=args.init)
    rank, size = dist.get_rank(), dist.get_world_size()

    tensor = torch.full((args.elements,), float(rank + 1))
    began = time.perf_counter()
    dist.all_reduce(tensor)
    elapsed = time.perf_counter() - began

    expected = size * (size + 1) / 2
    right = bool((tensor == expected).all())
    mark = "ok" if right else f"WRONG, expected {expected}"
    value = tensor[0].item() if args.elements else expected
    print(
        f"rank {rank}/{size}: {args.elements} elements, sum {value} {mark}, {elapsed * 1e3:.2f} ms",
        flush=True,
    )

    dist.barrier()
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
