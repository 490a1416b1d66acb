"""One step of a fold over numpy arrays of one type, with what would depend on place or processor settled.

Which of two NaNs an addition hands on, and which of two zeros a minimum does, depends on where an element
lies. So every NaN that a fold yields is the one quiet NaN with positive sign, and MIN takes -0 before +0
and MAX +0 before -0, as IEEE 754-2019 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frogzmq.types import ReduceOp

Bytes: TypeAlias = NDArray[np.uint8]
Array: TypeAlias = NDArray[Any]
Combine: TypeAlias = Callable[[Array, Array, Array], object]
"""``combine(a, b, out)``: element by element; ``out`` may be ``a`` or ``b``."""

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,  # the ranks have multiplied
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
LOGICAL: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.BOR: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.BAND: np.logical_and,
    ReduceOp.BXOR: np.logical_xor,
}


def combine_for(reduce: ReduceOp) -> Combine:
    """The step for real floats."""
    op = UFUNCS[reduce]
    if reduce in (ReduceOp.MIN, ReduceOp.MAX):
        merge = np.bitwise_or if reduce == ReduceOp.MIN else np.bitwise_and
        return lambda a, b, to: _extreme(op, merge, a, b, to)
    return lambda a, b, to: op(a, b, out=to)


def chain(xs: Sequence[Array], out: Array, acc: Array, combine: Combine) -> None:
    """Left fold of one block. Intermediate values go to ``acc``: ``out`` may be an input still needed."""
    value = xs[0]
    for x in xs[1:-1]:
        combine(value, x, acc)
        value = acc
    combine(value, xs[-1], out)


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


def complex_multiply(a: Array, b: Array, out: Array) -> None:
    """Product of (real, imaginary) pairs by the four real ones: numpy's own loop fuses some of them."""
    a_re, a_im, b_re, b_im = a[0::2], a[1::2], b[0::2], b[1::2]
    real = a_re * b_re
    real -= a_im * b_im
    imag = a_re * b_im
    imag += a_im * b_re
    out[0::2], out[1::2] = real, imag


def divide(values: Array, by: int, out: Array) -> None:
    """Divide by an integer in the dtype itself."""
    if by & (by - 1) == 0:
        # The inverse of a power of two is exact, so the product rounds as the quotient does, and sooner.
        np.multiply(values, values.dtype.type(1 / by), out=out)
    else:
        np.divide(values, values.dtype.type(by), out=out)


def has_nan(values: Array) -> bool:
    """Whether any value is NaN: one reading pass, because a maximum hands NaN on."""
    if not values.size:
        return False
    top = np.maximum.reduce(values)
    return bool(top != top)  # noqa: PLR0124 - how IEEE 754 tells NaN, ten times faster than np.isnan


def settle(values: Array) -> None:
    """Make every NaN the same NaN."""
    if has_nan(values):
        values[np.isnan(values)] = np.nan
