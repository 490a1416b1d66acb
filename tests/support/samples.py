"""Random contributions with the values that break things in them."""

from __future__ import annotations

import numpy as np

from frogzmq.dtypes import DTYPES, DType
from frogzmq.fold.support import CELLS
from frogzmq.types import ReduceOp

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    np.inf,
    -np.inf,
    np.nan,
    -np.nan,
    1e-45,
    6e-8,
    6.1e-5,
    65504.0,
    65519.0,
    65520.0,
    3.4e38,
)


def sample(dtype: DType, numel: int, seed: int, *, special: bool = True) -> np.ndarray:
    """``numel`` elements as uint8 bytes; floats spread over many binades, and special values if asked."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "bool":
        return rng.integers(0, 2, numel, dtype=np.uint8)
    if dtype.kind not in ("float", "half", "complex"):  # any byte is a float8, too
        return rng.integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
    count = numel * (2 if dtype.kind == "complex" else 1)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 4, count)
    if special and count:
        places = rng.random(count) < 0.2
        values[places] = rng.choice(SPECIAL, int(places.sum()))
    return as_bytes(values, dtype)


def as_bytes(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Real numbers (pairs for complex) rounded to the dtype; bfloat16 by cutting bits off."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            single = values.astype(np.float32)
            return (single.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        real = {"float16": "f2", "complex32": "f2", "float32": "f4", "complex64": "f4"}.get(dtype.name, "f8")
        return values.astype(real).view(np.uint8)


def cells(*kinds: str) -> list[tuple[DType, ReduceOp]]:
    """Every supported (dtype, op), or those of some kinds of dtype."""
    return [
        (dtype, op)
        for dtype in DTYPES.values()
        if not kinds or dtype.kind in kinds
        for op in sorted(CELLS[dtype.kind])
    ]


def cell_id(cell: tuple[DType, ReduceOp]) -> str:
    """``float32-SUM``."""
    return f"{cell[0].name}-{cell[1].name}"
