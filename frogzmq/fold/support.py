"""Which cells of (kind, reduce op, dtype) exist; asked before anything is sent."""

from __future__ import annotations

from frogzmq.dtypes import DType
from frogzmq.types import OpKind, ReduceOp

_FOLDING = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER)
_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})
_SCALED = frozenset({ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_EXTREMES = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})

CELLS: dict[str, frozenset[ReduceOp]] = {
    "float": _ARITHMETIC | _EXTREMES | _SCALED,
    "half": _ARITHMETIC | _EXTREMES | _SCALED,
    "quarter": _ARITHMETIC | _EXTREMES | _SCALED,
    "int": _ARITHMETIC | _EXTREMES | _BITWISE,
    "bool": _ARITHMETIC | _EXTREMES | _BITWISE,
    "complex": _ARITHMETIC | _SCALED,
    "opaque": frozenset(),
}
"""Reduce ops that each kind of dtype knows."""

_HINTS = {
    ReduceOp.AVG: "; convert to a float type, or use SUM and divide",
    ReduceOp.PREMUL_SUM: "; convert to a float type, or multiply it yourself and use SUM",
}


def refusal(kind: OpKind, reduce: ReduceOp, dtype: DType) -> str | None:
    """Why this cell is not supported, naming dtype and op; None where it is."""
    if kind not in _FOLDING:
        if reduce == ReduceOp.NONE:
            return None
        return f"{kind.name.lower()} does not reduce, but was given {reduce.name}"
    return fold_refusal(reduce, dtype)


def fold_refusal(reduce: ReduceOp, dtype: DType) -> str | None:
    """Why ``reduce`` cannot fold ``dtype``; None where it can."""
    known = CELLS[dtype.kind]
    if reduce in known:
        return None
    if not known:
        return (
            f"{dtype.name} cannot be reduced, only moved (broadcast, gather and such): {reduce.name} refused"
        )
    names = ", ".join(op.name for op in sorted(known))
    hint = _HINTS.get(reduce, "")
    return f"{reduce.name} is not supported for {dtype.name}: it can do {names}{hint}"
