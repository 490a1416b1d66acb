"""Folding byte arrays from left to right, the same bits whatever the machine, offset or block.

Two things would otherwise depend on where an element happens to lie or on the processor: which of two
NaNs an addition hands on, and which of two zeros a minimum does. So every NaN that a fold yields is the
one quiet NaN with positive sign, and MIN takes -0 before +0 and MAX +0 before -0, as IEEE 754-2019 has it.

Work goes block by block so that temporaries stay in L2; numpy's loops release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frogzmq.dtypes import DType
from frogzmq.errors import WireError
from frogzmq.fold import halves
from frogzmq.fold.support import fold_refusal
from frogzmq.types import ReduceOp

Bytes: TypeAlias = NDArray[np.uint8]
Array: TypeAlias = NDArray[Any]
Combine: TypeAlias = Callable[[Array, Array, Array], object]
"""``combine(a, b, out)``: element by element; ``out`` may be ``a`` or ``b``."""

BLOCK_BYTES = 1 << 20
"""Bytes of each input handled at a time: in L3, because every numpy call gives the interpreter lock away and
waits for it again, which costs a busy peer more than L2 would save."""

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_LOGICAL: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.BOR: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.BAND: np.logical_and,
    ReduceOp.BXOR: np.logical_xor,
}


def fold_into(
    out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int = 0
) -> None:
    """Fold ``inputs`` in the given order into ``out``; all are equally long uint8 vectors.

    ``out`` may be one of the inputs, else it must not overlap any. One input is copied. ``divide_by``
    above 0 divides the folded value (AVG). Halves accumulate in float32 and round once, at the end.
    ``WireError`` where the dtype does not know the op, ``ValueError`` where the lengths do not fit.
    """
    _check_lengths(out, inputs, dtype)
    if not out.nbytes:
        return  # a barrier, too: several inputs of no bytes and no op
    _check_cell(inputs, dtype, reduce, divide_by)
    if len(inputs) == 1 and not divide_by:
        if out.__array_interface__["data"] != inputs[0].__array_interface__["data"]:
            np.copyto(out, inputs[0])
        return
    # Infinities and NaNs are values here, not something to warn of.
    with np.errstate(all="ignore"):
        if dtype.kind == "half":
            _fold_half(out, inputs, dtype, reduce, divide_by)
        elif dtype.kind == "float" or (dtype.kind == "complex" and reduce != ReduceOp.PRODUCT):
            real = np.float32 if dtype.name in ("float32", "complex64") else np.float64
            _fold_float(out, inputs, np.dtype(real), reduce, divide_by)
        elif dtype.kind == "complex":
            _fold_complex_product(out, inputs, np.dtype(dtype.numpy))
        else:
            _fold_exact(out, inputs, dtype, reduce)


def _check_lengths(out: Bytes, inputs: Sequence[Bytes], dtype: DType) -> None:
    if not inputs:
        raise ValueError("a fold needs at least one input")
    if any(x.nbytes != out.nbytes for x in inputs) or out.nbytes % dtype.itemsize:
        sizes = [x.nbytes for x in inputs]
        raise ValueError(f"fold of {sizes} bytes of {dtype.name} into {out.nbytes} bytes")


def _check_cell(inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int) -> None:
    if len(inputs) > 1 or divide_by:
        refused = fold_refusal(ReduceOp.AVG if divide_by else reduce, dtype) or fold_refusal(reduce, dtype)
        if refused:
            raise WireError(refused)
    if divide_by and reduce not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"only a sum is divided, not a fold by {reduce.name}")


def _chain(xs: Sequence[Array], out: Array, acc: Array, combine: Combine) -> None:
    """Left fold of one block. Intermediate values go to ``acc``: ``out`` may be an input still needed."""
    value = xs[0]
    for x in xs[1:-1]:
        combine(value, x, acc)
        value = acc
    combine(value, xs[-1], out)


# ------------------------------------------------------------ integers and bool
def _fold_exact(out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp) -> None:
    kind: np.dtype[Any] = np.dtype(np.uint8 if dtype.kind == "bool" else dtype.numpy)
    if dtype.kind == "bool":
        # Any byte but 0 is true; what comes out is 0 or 1.
        op = _LOGICAL[reduce]

        def combine(a: Array, b: Array, to: Array) -> object:
            return op(a, b, out=to.view(np.bool_))
    else:
        op = _UFUNCS[reduce]

        def combine(a: Array, b: Array, to: Array) -> object:
            return op(a, b, out=to)

    target, xs = out.view(kind), [x.view(kind) for x in inputs]
    if len(xs) == 2:
        combine(xs[0], xs[1], target)
        return
    step = BLOCK_BYTES // kind.itemsize
    acc = np.empty(min(step, target.size), kind)
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        to = target[block]
        _chain([x[block] for x in xs], to, acc[: to.size], combine)


# ------------------------------------------------------------------ real floats
def _fold_float(
    out: Bytes, inputs: Sequence[Bytes], kind: np.dtype[Any], reduce: ReduceOp, divide_by: int
) -> None:
    target, xs = out.view(kind), [x.view(kind) for x in inputs]
    combine = _combine_for(reduce)
    step = BLOCK_BYTES // kind.itemsize
    if target.size <= step and len(xs) > 1:  # small ops are paid by the call: no slices
        _chain(xs, target, np.empty(target.size if len(xs) > 2 else 0, kind), combine)
        if divide_by:
            _divide(target, divide_by, target)
        _settle(target)
        return
    acc = np.empty(min(step, target.size) if len(xs) > 2 else 0, kind)
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        to = target[block]
        if len(xs) == 1:
            _divide(xs[0][block], divide_by, to)
        else:
            _chain([x[block] for x in xs], to, acc[: to.size], combine)
            if divide_by:
                _divide(to, divide_by, to)
        _settle(to)


def _combine_for(reduce: ReduceOp) -> Combine:
    op = _UFUNCS[reduce]
    if reduce in (ReduceOp.MIN, ReduceOp.MAX):
        merge = np.bitwise_or if reduce == ReduceOp.MIN else np.bitwise_and
        return lambda a, b, to: _extreme(op, merge, a, b, to)
    return lambda a, b, to: op(a, b, out=to)


def _extreme(op: np.ufunc, merge: np.ufunc, a: Array, b: Array, out: Array) -> None:
    """Minimum or maximum that orders -0 before +0: of two zeros the sign bits are merged."""
    unsigned = np.dtype(f"u{a.itemsize}")
    left, right = a.view(unsigned), b.view(unsigned)
    both = np.bitwise_or(left, right)
    np.left_shift(both, unsigned.type(1), out=both)
    if not both.size or both.min():
        op(a, b, out=out)
        return
    zeros = both == 0
    signs = merge(left, right, out=both)
    op(a, b, out=out)
    np.copyto(out.view(unsigned), signs, where=zeros)


def _divide(values: Array, by: int, out: Array) -> None:
    """Divide by an integer in the dtype itself."""
    if by & (by - 1) == 0:
        # The inverse of a power of two is exact, so the product rounds as the quotient does, and sooner.
        np.multiply(values, values.dtype.type(1 / by), out=out)
    else:
        np.divide(values, values.dtype.type(by), out=out)


def _settle(values: Array) -> None:
    """Make every NaN the same NaN."""
    if halves.has_nan(values):
        values[np.isnan(values)] = np.nan


# ---------------------------------------------------------------------- complex
def _fold_complex_product(out: Bytes, inputs: Sequence[Bytes], kind: np.dtype[Any]) -> None:
    """Products by the four real ones: numpy's own loop fuses some, depending on the processor."""
    real = np.dtype(np.float32 if kind.itemsize == 8 else np.float64)
    target, xs = out.view(real), [x.view(real) for x in inputs]
    step = BLOCK_BYTES // real.itemsize
    acc = np.empty(min(step, target.size), real)
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        to = target[block]
        _chain([x[block] for x in xs], to, acc[: to.size], _complex_multiply)
        _settle(to)


def _complex_multiply(a: Array, b: Array, out: Array) -> None:
    a_re, a_im, b_re, b_im = a[0::2], a[1::2], b[0::2], b[1::2]
    real = a_re * b_re
    real -= a_im * b_im
    imag = a_re * b_im
    imag += a_im * b_re
    out[0::2], out[1::2] = real, imag


# ----------------------------------------------------------------------- halves
def _fold_half(out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int) -> None:
    brain = dtype.name == "bfloat16"
    widen = halves.widen_bfloat16 if brain else halves.widen_float16
    narrow = halves.narrow_bfloat16 if brain else halves.narrow_float16
    target, xs = out.view(np.uint16), [x.view(np.uint16) for x in inputs]
    combine = _combine_for(reduce)
    size = min(halves.BLOCK, target.size)
    scratch = halves.Scratch(size)
    acc, operand = np.empty(size, np.float32), np.empty(size, np.float32)
    for start in range(0, target.size, halves.BLOCK):
        block = slice(start, start + halves.BLOCK)
        to = target[block]
        left, right = acc[: to.size], operand[: to.size]
        widen(xs[0][block], left, scratch)
        for x in xs[1:]:
            widen(x[block], right, scratch)
            combine(left, right, left)
        if divide_by:
            _divide(left, divide_by, left)
        narrow(left, to, scratch)
