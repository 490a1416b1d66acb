"""Order ``gloo``: the same bits as torch's Gloo itself gives for the same input and world size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
OPS = ("SUM", "PRODUCT", "MIN", "MAX")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (0, 1, 2, 3, 5, 7, 64, 1000, 4099, 100_003)
FEW = (0, 1, 5, 64, 4099)
BIG = 5_000_000
SPECIAL = (float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -6e-8, 65504.0, 3.0e38)


def given(rank: int, n: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Values whose sum depends on the order; among them infinities, subnormals, both zeros, and NaNs."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    if op == "PRODUCT":
        values = 1 + values / 8
    where = torch.randint(0, 97, (n,), generator=generator)
    for index, special in enumerate(SPECIAL):
        values[where == index] = special
    values[where == 40] = float("nan")
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def compare(
    rank: int, size: int, sizes: Sequence[int], ops: Sequence[str], names: Sequence[str]
) -> list[str]:
    """Differing cells; the number of compared ones last."""
    gloo = dist.new_group(backend="gloo")
    bad, count = [], 0
    for n in sizes:
        for name in names:
            for op in ops:
                dtype, reduce = getattr(torch, name), getattr(dist.ReduceOp, op)
                for what, call in CALLS.items():
                    if what.startswith("reduce_scatter") and not n:
                        continue
                    ours, theirs = (
                        call(rank, size, given(rank, n, dtype, op), reduce, group) for group in (None, gloo)
                    )
                    count += 1
                    if not torch.equal(bits(ours), bits(theirs)):
                        at = int((bits(ours) != bits(theirs)).nonzero()[0]) // ours.element_size()
                        bad.append(f"{what} {op} {name}[{n}] at {at}: {ours[at]!r} for {theirs[at]!r}")
    return [*bad, str(count)]


def _all_reduce(rank, size, tensor, reduce, group):
    dist.all_reduce(tensor, reduce, group=group)
    return tensor


def _reduce(rank, size, tensor, reduce, group):
    dist.reduce(tensor, size - 1, reduce, group=group)
    return tensor if rank == size - 1 else tensor[:0]


def _reduce_scatter(rank, size, tensor, reduce, group):
    whole = tensor.repeat_interleave(size)
    out = torch.empty_like(tensor)
    dist.reduce_scatter_tensor(out, whole, reduce, group=group)
    return out


def _reduce_scatter_list(rank, size, tensor, reduce, group):
    out = torch.empty_like(tensor)
    dist.reduce_scatter(out, [tensor.roll(d) for d in range(size)], reduce, group=group)
    return out


CALLS = {
    "all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter": _reduce_scatter_list,
}  # fmt: skip
NAMES = [str(dtype).removeprefix("torch.") for dtype in FLOATS]


def check(
    pool: Pool, placement: Sequence[int], sizes: Sequence[int], ops=OPS, names=tuple(NAMES), **options
) -> None:
    outcomes = pool.run(
        compare, placement, list(sizes), list(ops), list(names),
        options={"order": "gloo", **options}, deadline_s=500.0, timeout_s=120.0,
    )  # fmt: skip
    for *bad, count in outcomes:
        assert not bad, f"{len(bad)} of {count} cells differ:\n" + "\n".join(bad[:20])
        assert int(count) >= len(ops) * len(names)


def compare_others(rank: int, size: int, sizes: Sequence[int]) -> list[str]:
    """As ``compare``, of all_reduce: integers, averages, and NaNs that differ from rank to rank."""
    gloo = dist.new_group(backend="gloo")
    bad, count = [], 0

    def cell(label: str, tensor: torch.Tensor, op: str) -> None:
        nonlocal count
        ours, theirs = (
            bits(_all_reduce(rank, size, tensor.clone(), getattr(dist.ReduceOp, op), g)) for g in (None, gloo)
        )
        count += 1
        if not torch.equal(ours, theirs):
            bad.append(f"{op} {label}[{tensor.numel()}] at byte {int((ours != theirs).nonzero()[0])}")

    for n in sizes:
        generator = torch.Generator().manual_seed(100 * n + rank)
        for kind in (torch.uint8, torch.int8, torch.int32, torch.int64):
            ends = torch.iinfo(kind)
            whole = torch.randint(ends.min, ends.max, (n,), generator=generator, dtype=kind)
            for op in (*OPS, "BAND", "BOR", "BXOR"):
                cell(str(kind), whole, op)
        for dtype, (kind, quiet) in NANS.items():
            values = torch.full((n,), quiet + 1 + rank, dtype=kind).view(dtype)
            negative, number = torch.randint(0, 2, (2, n), generator=generator).bool()
            values = torch.where(negative, -values, values)
            values[number] = 1.5
            for op in OPS:
                cell(f"NaN {dtype}", values, op)
        for dtype in FLOATS:
            values = given(rank, n, dtype, "SUM")
            # Which NaN torch's division of bfloat16 makes depends on where the element lies.
            cell(
                str(dtype), values if dtype != torch.bfloat16 else torch.ones_like(values) / (rank + 3), "AVG"
            )
    return [*bad, str(count)]


NANS = {
    torch.float32: (torch.int32, 0x7FC00000), torch.float64: (torch.int64, 0x7FF8 << 48),
    torch.float16: (torch.int16, 0x7E00), torch.bfloat16: (torch.int16, 0x7FC0),
}  # fmt: skip


@pytest.mark.parametrize("placement", [[0, 0], [0, 1, 0]], ids=str)
def test_integers_averages_and_nans_that_differ(pool: Pool, placement: list[int]):
    for *bad, count in pool.run(compare_others, placement, [1, 7, 64, 1000], options={"order": "gloo"}):
        assert not bad, f"{len(bad)} of {count} cells differ:\n" + "\n".join(bad[:20])


PLACEMENTS = [[0, 0], [0, 1, 1], [0, 1, 2, 0], [0, 1, 0, 1, 2], [0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("placement", [[0, 0], [0, 1, 1], [0, 0, 1, 1, 2, 2]], ids=str)
def test_small_sizes(pool: Pool, placement: list[int]):
    check(pool, placement, FEW)


@pytest.mark.parametrize("mode", ["shard", "faithful"])
def test_the_mode_changes_nothing(pool: Pool, mode: str):
    check(pool, [0, 1, 2], (7, 300_007), ops=("SUM", "MAX"), names=("float32", "bfloat16"), mode=mode)


def test_large(pool: Pool):
    check(pool, [0, 1, 0], (BIG,), ops=("SUM",), names=("float32",))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.usefixtures("exhaustive")
def test_more_sizes(pool: Pool, placement: list[int]):
    check(pool, placement, SIZES)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.usefixtures("exhaustive")
def test_every_cell_at_5_million_elements(pool: Pool, placement: list[int]):
    for name in NAMES:
        check(pool, placement, (BIG,), names=(name,))


def train(rank: int, size: int, bucket_view: bool, steps: int) -> tuple[str, str]:
    """Parameters after DDP on digits, over Gloo and over this group, as hashes."""
    from hashlib import sha256

    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    data = load_digits()
    pixels, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    gloo = dist.new_group(backend="gloo")
    hashes = []
    for group in (gloo, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
        ddp = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=bucket_view, bucket_cap_mb=0.02
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            rows = torch.randint(1500, (16,), generator=torch.Generator().manual_seed(step * size + rank))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(pixels[rows]), labels[rows]).backward()
            optimizer.step()
        hashes.append(sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
    return hashes[0], hashes[1]


@pytest.mark.parametrize("bucket_view", [True, False])
def test_a_training_run_ends_with_the_parameters_that_gloo_gives(pool: Pool, bucket_view: bool):
    ends = pool.run(train, [0, 0, 1], bucket_view, 200, options={"order": "gloo"}, deadline_s=200.0)
    assert len({digest for pair in ends for digest in pair}) == 1
