"""Which cells of (kind, reduce op, dtype) exist; asked before anything is sent."""

from __future__ import annotations

from frogzmq.dtypes import DType
from frogzmq.types import OpKind, ReduceOp

_FOLDING = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER)
_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})
_EXTREMES = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})

CELLS: dict[str, frozenset[ReduceOp]] = {
    "float": _ARITHMETIC | _EXTREMES | {ReduceOp.AVG},
    "half": _ARITHMETIC | _EXTREMES | {ReduceOp.AVG},
    "int": _ARITHMETIC | _EXTREMES | _BITWISE,
    "bool": _ARITHMETIC | _EXTREMES | _BITWISE,
    "complex": _ARITHMETIC | {ReduceOp.AVG},
    "opaque": frozenset(),
}
"""Reduce ops that each kind of dtype knows."""


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
        return f"{dtype.name} cannot be reduced, only moved (broadcast, all_gather): {reduce.name} refused"
    names = ", ".join(op.name for op in sorted(known))
    hint = "; convert to a float type, or use SUM and divide" if reduce == ReduceOp.AVG else ""
    return f"{reduce.name} is not supported for {dtype.name}: it can do {names}{hint}"
