"""Folding byte arrays from left to right, the same bits whatever the machine, offset or block.

Work goes block by block so that temporaries stay in L2; numpy's loops release the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frogzmq.dtypes import DType
from frogzmq.errors import WireError
from frogzmq.fold.arithmetic import (
    LOGICAL,
    UFUNCS,
    Array,
    Bytes,
    chain,
    combine_for,
    complex_multiply,
    divide,
    settle,
)
from frogzmq.fold.narrow import fold_narrow, is_narrow
from frogzmq.fold.support import fold_refusal
from frogzmq.types import ReduceOp

BLOCK_BYTES = 1 << 20
"""Bytes of each input handled at a time: in L3, because every numpy call gives the interpreter lock away and
waits for it again, which costs a busy peer more than L2 would save."""


def fold_into(
    out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int = 0
) -> None:
    """Fold ``inputs`` in the given order into ``out``; all are equally long uint8 vectors.

    ``out`` may be one of the inputs, else it must not overlap any. One input is copied. ``divide_by``
    above 0 divides the folded value (AVG). What is narrower than float32 accumulates in float32 and rounds
    once, at the end.
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
        if is_narrow(dtype):
            fold_narrow(out, inputs, dtype, reduce, divide_by)
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


# ------------------------------------------------------------ integers and bool
def _fold_exact(out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp) -> None:
    kind: np.dtype[Any] = np.dtype(np.uint8 if dtype.kind == "bool" else dtype.numpy)
    if dtype.kind == "bool":
        # Any byte but 0 is true; what comes out is 0 or 1.
        op = LOGICAL[reduce]

        def combine(a: Array, b: Array, to: Array) -> object:
            return op(a, b, out=to.view(np.bool_))
    else:
        op = UFUNCS[reduce]

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
        chain([x[block] for x in xs], to, acc[: to.size], combine)


# ------------------------------------------------------------------ real floats
def _fold_float(
    out: Bytes, inputs: Sequence[Bytes], kind: np.dtype[Any], reduce: ReduceOp, divide_by: int
) -> None:
    target, xs = out.view(kind), [x.view(kind) for x in inputs]
    combine = combine_for(reduce)
    step = BLOCK_BYTES // kind.itemsize
    if target.size <= step and len(xs) > 1:  # small ops are paid by the call: no slices
        chain(xs, target, np.empty(target.size if len(xs) > 2 else 0, kind), combine)
        if divide_by:
            divide(target, divide_by, target)
        settle(target)
        return
    acc = np.empty(min(step, target.size) if len(xs) > 2 else 0, kind)
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        to = target[block]
        if len(xs) == 1:
            divide(xs[0][block], divide_by, to)
        else:
            chain([x[block] for x in xs], to, acc[: to.size], combine)
            if divide_by:
                divide(to, divide_by, to)
        settle(to)


# ---------------------------------------------------------------------- complex
def _fold_complex_product(out: Bytes, inputs: Sequence[Bytes], kind: np.dtype[Any]) -> None:
    """Products of pairs of reals."""
    real = np.dtype(np.float32 if kind.itemsize == 8 else np.float64)
    target, xs = out.view(real), [x.view(real) for x in inputs]
    step = BLOCK_BYTES // real.itemsize
    acc = np.empty(min(step, target.size), real)
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        to = target[block]
        chain([x[block] for x in xs], to, acc[: to.size], complex_multiply)
        settle(to)
