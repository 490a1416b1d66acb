"""What the collectives give through ``torch.distributed``, on two machines of one and two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

pytestmark = pytest.mark.torch
Machines = Callable[[int], list[Path]]


def every_kind(rank: int, size: int) -> None:  # noqa: C901, PLR0915 - one start, many checks
    R = dist.ReduceOp
    ranks = range(size)

    def of(r, shape=(3, 4), dtype=torch.float32):
        n = int(np.prod(shape))
        return (torch.arange(n).reshape(shape) % 5 + r + 1).to(dtype)

    def fold(op, tensors):
        stack = torch.stack(tensors)
        if op == R.SUM:
            return sum(tensors[1:], tensors[0])
        if op == R.AVG:
            return sum(tensors[1:], tensors[0]) / len(tensors)
        if op == R.PRODUCT:
            return torch.prod(stack.double() if stack.is_floating_point() else stack, 0).to(stack.dtype)
        if op == R.MIN:
            return stack.amin(0)
        if op == R.MAX:
            return stack.amax(0)
        out = tensors[0]
        for t in tensors[1:]:
            out = {R.BAND: torch.bitwise_and, R.BOR: torch.bitwise_or, R.BXOR: torch.bitwise_xor}[op](out, t)
        return out

    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    ints = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    for dtype in floats + ints:
        ops = [R.SUM, R.PRODUCT, R.MIN, R.MAX]
        ops += [R.AVG] if dtype in floats else [R.BAND, R.BOR, R.BXOR]
        for op in ops:
            t = of(rank, dtype=dtype)
            dist.all_reduce(t, op=op)
            want = fold(op, [of(r, dtype=dtype) for r in ranks])
            torch.testing.assert_close(t, want)
    # complex (moved as real views), wrapping integers, bool
    c = of(rank, dtype=torch.complex64) * (1 + 2j)
    dist.all_reduce(c)
    torch.testing.assert_close(c, sum(of(r, dtype=torch.complex64) * (1 + 2j) for r in ranks))
    wrap = torch.tensor([200, 100], dtype=torch.uint8)
    dist.all_reduce(wrap)
    assert wrap.tolist() == [600 % 256, 300 % 256]
    for op, want in ((R.SUM, [True, True, False]), (R.MIN, [True, False, False]), (R.BXOR, None)):
        b = torch.tensor([True, rank == 0, False])
        dist.all_reduce(b, op=op)
        assert b.view(torch.uint8).max() <= 1
        if want is not None:
            assert b.tolist() == want, (op, b)
    # 0-dim and empty, between normal ones
    for shape in ((), (0,), (1, 0, 2), (2,)):
        t = torch.full(shape, float(rank))
        dist.all_reduce(t)
        assert t.shape == shape
        assert (t == sum(ranks)).all()
        dist.broadcast(t, 1)
        outs = [torch.empty(shape) for _ in ranks]
        dist.all_gather(outs, torch.full(shape, float(rank)))
        assert all((o == r).all() and o.shape == shape for r, o in enumerate(outs))
    # broadcast of every dtype that only moves
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.int16):
        t = (torch.ones(5) * (rank + 1)).to(dtype)
        dist.broadcast(t, size - 1)
        assert (
            t.to(torch.complex128).real.tolist()
            == (torch.ones(5) * size).to(dtype).to(torch.complex128).real.tolist()
        )
    # reduce touches the root only
    for root in ranks:
        t = of(rank)
        dist.reduce(t, root)
        torch.testing.assert_close(t, sum(of(r) for r in ranks) if rank == root else of(rank))
    # all_gather into one tensor: flat, stacked, (1, n)
    for shape in ((3,), (2, 3)):
        want = torch.stack([of(r, shape) for r in ranks])
        for layout in ((size * shape[0], *shape[1:]), (size, *shape), (1, want.numel())):
            out = torch.zeros(layout)
            dist.all_gather_into_tensor(out, of(rank, shape))
            assert torch.equal(out.reshape(want.shape), want)
    # large ones: through the arena
    big = torch.full((300_001,), rank + 1.0)
    dist.all_reduce(big)
    assert (big == sum(r + 1 for r in ranks)).all()
    outs = [torch.zeros(300_001) for _ in ranks]
    dist.all_gather(outs, torch.full((300_001,), float(rank)))
    assert all((o == r).all() for r, o in enumerate(outs))
    b = torch.full((300_001,), float(rank))
    dist.broadcast(b, 1)
    assert (b == 1).all()
    # coalesced
    ts = [of(rank), of(rank, (2, 2)).t()]
    dist.all_reduce_coalesced(ts)
    torch.testing.assert_close(ts[0], sum(of(r) for r in ranks))
    torch.testing.assert_close(ts[1], sum(of(r, (2, 2)).t() for r in ranks))
    # autograd leaves, and objects
    p = torch.nn.Parameter(torch.full((4,), float(rank)))
    dist.broadcast(p, 2)
    assert p.tolist() == [2.0] * 4
    got = [None] * size
    dist.all_gather_object(got, {"rank": rank})
    assert got == [{"rank": r} for r in ranks]
    sub = dist.new_group([0, 2])
    if rank != 1:
        t = torch.ones(1)
        dist.all_reduce(t, group=sub)
        assert t.item() == 2
    assert dist.get_backend() == "frogzmq"


def strides(rank: int, size: int) -> None:
    n, ranks = 6, range(size)
    base = lambda r: torch.arange(float(n * n)).reshape(n, n) * 10 + r  # noqa: E731
    views = {
        "column": lambda t: t[:, 2],
        "transpose": lambda t: t.t(),
        "every second": lambda t: t.reshape(-1)[::2],
        "narrow": lambda t: t.narrow(1, 1, 3),
        "conj": lambda t: t,
    }
    for name, view in views.items():
        # Ranks differ in strides: the odd ones give a contiguous copy.
        def mine(r, view=view):
            t = base(r)
            v = view(t)
            return (t, v) if r % 2 == 0 else (v.clone(), v.contiguous().clone())

        want = sum(view(base(r)) for r in ranks)
        t, v = mine(rank)
        rest = t.clone()
        dist.all_reduce(v)
        assert torch.equal(v, want), name
        if rank % 2 == 0:
            view(rest).copy_(want)
            assert torch.equal(t, rest), f"{name}: elements outside the view were touched"
        t, v = mine(rank)
        dist.broadcast(v, 1)
        assert torch.equal(v, view(base(1))), name
        t, v = mine(rank)
        outs = [view(torch.zeros(n, n)) if (r + rank) % 2 else torch.zeros_like(want) for r in ranks]
        dist.all_gather(outs, v)
        assert all(torch.equal(o, view(base(r))) for r, o in enumerate(outs)), name
        t, v = mine(rank)
        dist.reduce(v, 0)
        assert torch.equal(v, want if rank == 0 else view(base(rank))), name
    # An expanded input is fine; an expanded output is an error before anything is sent.
    outs = [torch.zeros(3, 2) for _ in ranks]
    dist.all_gather(outs, torch.full((3, 1), float(rank)).expand(3, 2))
    assert all((o == r).all() for r, o in enumerate(outs))
    for call in (
        lambda: dist.all_reduce(torch.ones(3, 1).expand(3, 2)),
        lambda: dist.all_gather([torch.ones(1).expand(4) for _ in ranks], torch.ones(4)),
        lambda: dist.all_gather_into_tensor(torch.zeros(2, size).t(), torch.zeros(2)),
    ):
        try:
            call()
        except dist.DistBackendError as error:
            text = str(error)
        else:
            text = "no error"
        assert "memory" in text or "contiguous" in text, text
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size


def refusals(rank: int, size: int) -> list[str]:
    R = dist.ReduceOp
    calls = {
        "avg of ints": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=R.AVG),
        "bits of floats": lambda: dist.all_reduce(torch.ones(2), op=R.BAND),
        "float8": lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e8m0fnu)),
        "sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
        "meta": lambda: dist.all_reduce(torch.ones(2, device="meta")),
        "premul": lambda: dist.all_reduce(
            torch.ones(2, dtype=torch.int32), op=dist._make_nccl_premul_sum(2.0)
        ),
        "send": lambda: dist.send(torch.ones(2), (rank + 1) % size, tag=-1),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(size + 1)),
        "sizes": lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(3)),
        "dtypes": lambda: dist.all_gather_into_tensor(torch.ones(3 * size).double(), torch.ones(3)),
        "list": lambda: dist.all_gather([torch.ones(3)] * size, torch.ones(4)),
    }
    texts = []
    for name, call in calls.items():
        try:
            call()
        except dist.DistBackendError as error:
            texts.append(f"{name}: {type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{name}: no error")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size
    return texts


def test_every_kind(tmp_path: Path, machines: Machines) -> None:
    run_ranks(tmp_path, every_kind, 3, machines(2))


def test_strides(tmp_path: Path, machines: Machines) -> None:
    run_ranks(tmp_path, strides, 3, machines(1))


def test_refusals_come_before_anything_is_sent(tmp_path: Path, machines: Machines) -> None:
    texts, _ = run_ranks(tmp_path, refusals, 2, machines(1))
    text = "\n".join(texts)
    for part in (
        "avg of ints: UnsupportedType: all_reduce: AVG is not supported for int32",
        "bits of floats: UnsupportedType",
        "float8: UnsupportedType: all_reduce: ",
        "sparse: UnsupportedType: all_reduce: torch.sparse_csr",
        "meta: UnsupportedType",
        "premul: UnsupportedType: all_reduce: PREMUL_SUM is not supported for int32",
        "send: BadTensor: send: Tag must be nonnegative",
        "reduce_scatter: BadTensor: reduce_scatter_tensor: the input must hold 2 elements",
        "sizes: BadTensor: all_gather_into_tensor: the output needs 6 elements and has 5: output (5,)",
        "dtypes: BadTensor",
        "list: BadTensor: all_gather: invalid output tensor list at index 0",
    ):
        assert part in text, text
