"""Folding what is narrower than float32: widen, fold in float32, round once.

A complex32 is a pair of float16, and is folded as such; only its product looks at pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frogzmq.dtypes import DType
from frogzmq.fold import halves, quarters
from frogzmq.fold.arithmetic import Bytes, combine_for, complex_multiply, divide
from frogzmq.types import ReduceOp

Convert = Callable[[Any, Any, halves.Scratch], None]
"""``convert(source, out, scratch)`` of at most ``BLOCK`` elements; narrowing may overwrite its source."""

_CONVERTERS: dict[str, tuple[Any, Convert, Convert]] = {
    "float16": (np.uint16, halves.widen_float16, halves.narrow_float16),
    "complex32": (np.uint16, halves.widen_float16, halves.narrow_float16),
    "bfloat16": (np.uint16, halves.widen_bfloat16, halves.narrow_bfloat16),
    **{name: (np.uint8, *quarters.converters(name)) for name in quarters.FORMATS},
}


def is_narrow(dtype: DType) -> bool:
    """Whether ``fold_narrow`` is the one to fold this type."""
    return dtype.name in _CONVERTERS


def fold_narrow(out: Bytes, inputs: Sequence[Bytes], dtype: DType, reduce: ReduceOp, divide_by: int) -> None:
    """``fold_into`` for these types; checked by it."""
    bits, widen, narrow = _CONVERTERS[dtype.name]
    target, xs = out.view(bits), [x.view(bits) for x in inputs]
    pairs = dtype.kind == "complex" and reduce == ReduceOp.PRODUCT
    combine = complex_multiply if pairs else combine_for(reduce)
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
            divide(left, divide_by, left)
        narrow(left, to, scratch)
