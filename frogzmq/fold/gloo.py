"""Folding float types as torch's Gloo does, bit for bit: one rounding a step, C++'s min and max.

A step takes the local value first and the received one second. ``std::min`` and ``std::max`` keep their first
argument unless the second wins a comparison, so a NaN that is local stays, and one that was received goes.

Which of two NaNs numpy's additions hand on depends on where an element lies, so that two machines that fold
the same bytes could differ. Where a fold yields NaN it is done again in steps that hand on the local one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frogzmq.dtypes import DType
from frogzmq.fold import halves
from frogzmq.fold.arithmetic import Array, Bytes, divide, has_nan
from frogzmq.fold.kernels import BLOCK_BYTES, fold_into
from frogzmq.types import ReduceOp

_COMPARED = (ReduceOp.MIN, ReduceOp.MAX)
_HALVES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "float16": (halves.widen_float16, halves.narrow_float16),
    "bfloat16": (halves.widen_bfloat16, halves.narrow_bfloat16),
}


def fold_ring(
    out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int = 0
) -> None:
    """``fold_into`` in Gloo's arithmetic; ``inputs`` as ``plan.sources`` has them, in the ring's order."""
    if dtype.kind not in ("float", "half") or len(inputs) < 2 or not out.nbytes:
        fold_into(out, inputs, dtype, reduce, divide_by)
        return
    with np.errstate(all="ignore"):
        if dtype.kind == "half":
            _fold_halves(out, inputs, dtype.name, reduce, divide_by)
        else:
            _fold_floats(out, inputs, np.dtype(dtype.numpy), reduce, divide_by)


def _pick(reduce: ReduceOp, local: Array, received: Array) -> Array:
    """Where the received value is taken."""
    picked: Array = local < received if reduce == ReduceOp.MAX else received < local
    return picked


def _step(combine: np.ufunc, local: Array, acc: Array) -> None:
    """One step into ``acc``; of two NaNs the local one is handed on, quiet, wherever the element lies."""
    both = None
    if has_nan(acc) and has_nan(local):
        both = np.isnan(local) & np.isnan(acc)
    combine(local, acc, out=acc)
    if both is not None:
        unsigned = np.dtype(f"u{acc.itemsize}")
        quiet = unsigned.type(1 << (np.finfo(acc.dtype).nmant - 1))
        acc.view(unsigned)[both] = local.view(unsigned)[both] | quiet


def _fold_floats(
    out: Bytes, inputs: Sequence[Bytes], kind: np.dtype[Any], reduce: ReduceOp, divide_by: int
) -> None:
    target, xs = out.view(kind), [x.view(kind) for x in inputs]
    step = BLOCK_BYTES // kind.itemsize
    combine = np.multiply if reduce == ReduceOp.PRODUCT else np.add
    for start in range(0, target.size, step):
        block = slice(start, start + step)
        acc = xs[0][block].copy()  # the output may be an input that is needed later
        for x in xs[1:]:
            local = x[block]
            if reduce in _COMPARED:
                acc = np.where(_pick(reduce, local, acc), acc, local)
            else:
                combine(local, acc, out=acc)
        if reduce not in _COMPARED and has_nan(acc):
            acc = xs[0][block].copy()
            for x in xs[1:]:
                _step(combine, x[block], acc)
        if divide_by:
            np.divide(acc, acc.dtype.type(divide_by), out=acc)
        target[block] = acc


def _fold_halves(out: Bytes, inputs: Sequence[Bytes], name: str, reduce: ReduceOp, divide_by: int) -> None:
    widen, narrow = _HALVES[name]
    target, xs = out.view(np.uint16), [x.view(np.uint16) for x in inputs]
    size = min(halves.BLOCK, target.size)
    scratch = halves.Scratch(size)
    wide_acc, wide_local = np.empty(size, np.float32), np.empty(size, np.float32)
    combine = np.multiply if reduce == ReduceOp.PRODUCT else np.add
    for start in range(0, target.size, halves.BLOCK):
        block = slice(start, start + halves.BLOCK)
        acc = xs[0][block].copy()
        left, right = wide_acc[: acc.size], wide_local[: acc.size]
        for x in xs[1:]:
            local = x[block]
            if reduce in _COMPARED:
                acc = np.where(_pick(reduce, _values(local, name), _values(acc, name)), acc, local)
                continue
            widen(acc, left, scratch)
            widen(local, right, scratch)
            _step(combine, right, left)
            _round(left, acc, name, narrow, scratch)
        if divide_by:
            widen(acc, left, scratch)
            divide(left, divide_by, left)
            _round(left, acc, name, narrow, scratch)
        target[block] = acc


def _values(bits: Array, name: str) -> Array:
    """The numbers that half-precision bits stand for, in order, for comparing."""
    if name == "float16":
        return bits.view(np.float16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round(wide: Array, out: Array, name: str, narrow: Callable[..., None], scratch: halves.Scratch) -> None:
    """Round to half precision; float16 keeps a NaN's sign, bfloat16 does not."""
    if name != "float16" or not has_nan(wide):
        narrow(wide, out, scratch)
        return
    odd = np.isnan(wide)
    signs = (wide.view(np.uint32)[odd] >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
    narrow(wide, out, scratch)
    out[odd] = signs | np.uint16(0x7E00)
