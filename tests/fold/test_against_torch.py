"""Every cell against what torch computes on one machine, wherever torch knows the cell."""

from __future__ import annotations

import numpy as np
import pytest
from support.samples import cell_id, cells, sample

from frogzmq.dtypes import DType, dtype_of
from frogzmq.fold.kernels import fold_into
from frogzmq.fold.narrow import is_narrow
from frogzmq.types import ReduceOp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
NUMEL = 4099


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensor(raw: np.ndarray, dtype: DType, op: ReduceOp):
    """The bytes as a tensor; halves widened to float32, as both sides fold them."""
    own = torch.frombuffer(bytearray(raw.tobytes()), dtype=getattr(torch, dtype.name))
    if own.is_complex() and op != ReduceOp.PRODUCT:
        own = torch.view_as_real(own)  # as Gloo adds them: torch.add would multiply by 1+0j first
    if dtype.name == "complex32" and own.is_complex():
        return own.to(torch.complex64)
    return own.float() if is_narrow(dtype) else own


def steps(op: ReduceOp, dtype: DType):
    """torch's function for one step of the fold."""
    if dtype.kind == "bool":
        return {
            ReduceOp.SUM: torch.logical_or, ReduceOp.MAX: torch.logical_or, ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.PRODUCT: torch.logical_and, ReduceOp.MIN: torch.logical_and,
            ReduceOp.BAND: torch.bitwise_and, ReduceOp.BXOR: torch.bitwise_xor,
        }[op]  # fmt: skip
    return {
        ReduceOp.SUM: torch.add, ReduceOp.AVG: torch.add, ReduceOp.PREMUL_SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum, ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor,
    }[op]  # fmt: skip


def torch_fold(inputs: list[np.ndarray], dtype: DType, op: ReduceOp):
    """Left fold in torch, or a skip where torch has no such cell."""
    step = steps(op, dtype)
    try:
        total = tensor(inputs[0], dtype, op)
        for x in inputs[1:]:
            total = step(total, tensor(x, dtype, op))
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented" in str(error) or "not supported" in str(error):
            pytest.skip(f"torch cannot: {error}")
        raise
    if op == ReduceOp.AVG:
        total = total / len(inputs)
    elif total.is_complex():
        total = torch.view_as_real(total)
    if not is_narrow(dtype):
        return total
    return total.to(torch.float16 if dtype.kind == "complex" else getattr(torch, dtype.name))


def result_tensor(out: np.ndarray, dtype: DType):
    ours = torch.frombuffer(bytearray(out.tobytes()), dtype=getattr(torch, dtype.name))
    return torch.view_as_real(ours) if ours.is_complex() else ours


def assert_same_bits(ours, theirs, op: ReduceOp) -> None:
    """Equal bytes, but that any NaN is as good as another, and for MIN/MAX either zero.

    torch's own vector and scalar loops differ in both, so its bits there depend on the position.
    """
    if ours.is_floating_point():
        if ours.element_size() == 1:
            ours, theirs = ours.float(), theirs.float()
        assert torch.equal(torch.isnan(ours), torch.isnan(theirs))
        ours, theirs = (torch.nan_to_num(x, 0.5, torch.inf, -torch.inf) for x in (ours, theirs))
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            ours, theirs = ours + 0.0, theirs + 0.0
    assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("cell", cells(), ids=cell_id)
@pytest.mark.parametrize("count", [2, 4])
def test_cell_equals_torch(cell, count):
    dtype, op = cell
    # torch multiplies complex numbers with two roundings in its vector loop and with one in the rest of it.
    numel = NUMEL // 64 * 64 if (dtype.kind, op) == ("complex", ReduceOp.PRODUCT) else NUMEL
    inputs = [sample(dtype, numel, 100 + seed) for seed in range(count)]
    theirs = torch_fold(inputs, dtype, op)
    out = np.empty_like(inputs[0])
    fold_into(out, inputs, dtype, op, count if op == ReduceOp.AVG else 0)
    assert_same_bits(result_tensor(out, dtype), theirs, op)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_two_halves_equal_torch_in_the_dtype_itself(name, op):
    """With two inputs there is one rounding only, so torch's own half arithmetic gives the same bits."""
    dtype = dtype_of(name)
    inputs = [sample(dtype, NUMEL, 200 + seed) for seed in range(2)]
    a, b = (torch.frombuffer(bytearray(x.tobytes()), dtype=getattr(torch, name)) for x in inputs)
    out = np.empty_like(inputs[0])
    fold_into(out, inputs, dtype, op)
    assert_same_bits(result_tensor(out, dtype), steps(op, dtype)(a, b), op)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_wins_wherever_it_is(name, op, place):
    dtype = dtype_of(name)
    tensors = [torch.ones(9, dtype=getattr(torch, name)) for _ in range(3)]
    tensors[place][4] = torch.nan
    inputs = [x.view(torch.uint8).numpy() for x in tensors]
    out = np.empty_like(inputs[0])
    fold_into(out, inputs, dtype, op)
    assert torch.isnan(result_tensor(out, dtype)).tolist() == [False] * 4 + [True] + [False] * 4
