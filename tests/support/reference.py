"""What a collective must give, computed dumbly: whole arrays, no blocks, no tricks, no frogzmq kernels.

``reference`` is the oracle of every test that looks at results. It shares only the descriptor and the
dtype table with the package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from frogzmq.descriptor import Descriptor
from frogzmq.dtypes import DType, dtype_of
from frogzmq.types import OpKind, Order, ReduceOp


def reference(
    descriptor: Descriptor,
    inputs: Sequence[bytes | np.ndarray],
    hosts: Sequence[Sequence[int]],
    order: Order = Order.MACHINE,
) -> bytes:
    """The result's bytes, as one rank reads them; of dealt kinds all ranks' results, one after the other.

    ``inputs[r]`` is what rank r gives; ``hosts`` lists each machine's ranks.
    """
    kind, dtype = descriptor.kind, dtype_of(descriptor.dtype)
    raw = [
        np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x.reshape(-1).view(np.uint8) for x in inputs
    ]
    if kind == OpKind.BARRIER:
        return b""
    if kind == OpKind.BROADCAST:
        return raw[descriptor.root].tobytes()
    if kind == OpKind.SCATTER:
        return raw[descriptor.root].tobytes()
    if kind in (OpKind.ALL_GATHER, OpKind.GATHER):
        return b"".join(x.tobytes() for x in raw)
    if kind == OpKind.ALL_TO_ALL:
        return b"".join(each_rank(descriptor, raw))
    op = descriptor.reduce
    divide_by = len(raw) if op == ReduceOp.AVG else 0
    machines = sorted((sorted(ranks) for ranks in hosts), key=lambda ranks: ranks[0])
    if order == Order.RANK or len(machines) == 1:
        return level([raw[rank] for rank in range(len(raw))], dtype, op, divide_by).tobytes()
    parts = [level([raw[rank] for rank in ranks], dtype, op) for ranks in machines]
    return level(parts, dtype, op, divide_by).tobytes()


def each_rank(descriptor: Descriptor, raw: Sequence[np.ndarray]) -> list[bytes]:
    """What each rank gets of an all_to_all."""
    world, itemsize = len(raw), dtype_of(descriptor.dtype).itemsize
    even = descriptor.numel // world
    matrix = np.array(descriptor.splits or [even] * world**2).reshape(world, world) * itemsize
    starts = np.concatenate([np.zeros((world, 1), int), matrix.cumsum(axis=1)], axis=1)
    return [
        b"".join(raw[s][starts[s, d] : starts[s, d + 1]].tobytes() for s in range(world))
        for d in range(world)
    ]


def results(
    descriptor: Descriptor,
    inputs: Sequence[bytes | np.ndarray],
    hosts: Sequence[Sequence[int]],
    order: Order = Order.MACHINE,
) -> list[bytes | None]:
    """What each rank reads; None where it gets no data."""
    kind, world = descriptor.kind, len(inputs)
    whole = reference(descriptor, inputs, hosts, order)
    if kind == OpKind.BARRIER:
        return [None] * world
    if kind in (OpKind.REDUCE, OpKind.GATHER):
        return [whole if rank == descriptor.root else None for rank in range(world)]
    if kind == OpKind.BROADCAST:
        return [None if rank == descriptor.root else whole for rank in range(world)]
    if kind not in (OpKind.SCATTER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
        return [whole] * world
    itemsize = dtype_of(descriptor.dtype).itemsize
    if kind == OpKind.SCATTER:
        sizes = [descriptor.numel] * world
    elif kind == OpKind.REDUCE_SCATTER:
        sizes = list(descriptor.splits) or [descriptor.numel // world] * world
    else:
        matrix = np.array(descriptor.splits or [descriptor.numel // world] * world**2)
        sizes = matrix.reshape(world, world).sum(axis=0).tolist()
    ends = np.cumsum([0, *sizes]) * itemsize
    return [whole[start:stop] for start, stop in pairwise(ends)]


def level(inputs: Sequence[np.ndarray], dtype: DType, op: ReduceOp, divide_by: int = 0) -> np.ndarray:
    """One left fold with one rounding: uint8 arrays in, uint8 array out. One input stays as it is."""
    if len(inputs) == 1 and not divide_by:
        return inputs[0].copy()
    with np.errstate(all="ignore"):
        values = [to_values(x, dtype) for x in inputs]
        total = values[0]
        for value in values[1:]:
            total = combine(total, value, op)
        if divide_by:
            total = divide(total, divide_by)
        return from_values(total, dtype)


def to_values(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """An array to compute with; halves as float32."""
    if dtype.name == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.name in ("float16", "complex32"):
        wide = raw.view(np.float16).astype(np.float32)
        return wide if dtype.kind == "half" else wide.view(np.complex64)
    if dtype.kind == "quarter":
        return np.array(quarters(dtype.name))[raw].astype(np.float32)
    if dtype.name == "bool":
        return raw != 0
    return raw.view(dtype.numpy)


def from_values(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Back to bytes; every NaN becomes the positive quiet one."""
    if dtype.kind in ("float", "complex", "half", "quarter"):
        real = values.view(values.real.dtype).copy()
        real[np.isnan(real)] = np.nan
        values = real
    if dtype.name == "bfloat16":
        values = nearest_bfloat16(values)
    elif dtype.name in ("float16", "complex32"):
        values = values.astype(np.float16)
    elif dtype.kind == "quarter":
        values = nearest_quarter(values, dtype.name)
    return np.ascontiguousarray(values).view(np.uint8)


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearer of the two neighbours, measured in float64; of two equally near ones the even."""
    down = values.view(np.uint32) >> 16
    up = down + 1
    exact = values.astype(np.float64)
    below = (down << 16).view(np.float32).astype(np.float64)
    above = (up << 16).view(np.float32).astype(np.float64)
    # Beyond the largest finite value the next step is infinity, which counts as 2**128 away from zero.
    above = np.where(np.isinf(above), np.sign(above) * 2.0**128, above)
    to_below, to_above = np.abs(exact - below), np.abs(above - exact)
    pick_up = (to_above < to_below) | ((to_above == to_below) & (down % 2 == 1))
    chosen = np.where(pick_up & np.isfinite(values), up, down).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), chosen)


@functools.cache
def quarters(name: str) -> tuple[float, ...]:
    """The value of each code of a float8 format, from its definition."""
    fraction = 3 if "e4m3" in name else 2
    finite_only, fnuz = name == "float8_e4m3fn", name.endswith("uz")
    bias = 2 ** (6 - fraction) - 1 + fnuz
    found = []
    for code in range(256):
        exponent, bits = (code & 127) >> fraction, code & ((1 << fraction) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - fraction)
        value = scale * (bits + (exponent > 0) * 2**fraction)
        if (finite_only and code & 127 == 127) or (fnuz and code == 128):
            value = math.nan
        elif not finite_only and not fnuz and exponent == 31:
            value = math.nan if bits else math.inf
        found.append(-value if code & 128 else value)
    return tuple(found)


def nearest_quarter(values: np.ndarray, name: str) -> np.ndarray:
    """Codes of the nearest values; of two equally near ones the even. Beyond the last as torch has it."""
    known = quarters(name)
    finite = [code for code in range(128) if math.isfinite(known[code])]
    # What would come next if the format went on: half way to it, and beyond, is too large.
    after = 2 * known[finite[-1]] - known[finite[-2]]
    steps = np.array([known[code] for code in finite] + [after])
    halfway = (steps[1:] + steps[:-1]) / 2
    exact = np.abs(values.astype(np.float64))
    # How many half-way points lie below, and how many not above: they differ where it stands on one.
    below, upto = np.searchsorted(halfway, exact, "left"), np.searchsorted(halfway, exact, "right")
    codes = np.where(below % 2 == 0, below, upto).astype(np.uint8)
    nan = 0x80 if name.endswith("uz") else 0x7F
    too_large = {"float8_e5m2": 0x7C, "float8_e4m3fn": 0x7E}.get(name, nan)
    codes[codes > finite[-1]] = too_large
    positive = (codes == nan) | ((codes == 0) & name.endswith("uz"))
    codes = np.where(np.signbit(values) & ~positive, codes | 0x80, codes)
    return np.where(np.isnan(values), nan, codes).astype(np.uint8)


def combine(a: np.ndarray, b: np.ndarray, op: ReduceOp) -> np.ndarray:
    """One step of the fold."""
    if a.dtype == np.bool_:
        either = op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)
        return a | b if either else a ^ b if op == ReduceOp.BXOR else a & b
    if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        return a + b
    if op == ReduceOp.PRODUCT:
        if a.dtype.kind != "c":
            return a * b
        product = np.empty_like(a)
        product.real = a.real * b.real - a.imag * b.imag
        product.imag = a.real * b.imag + a.imag * b.real
        return product
    if op == ReduceOp.BAND:
        return a & b
    if op == ReduceOp.BOR:
        return a | b
    if op == ReduceOp.BXOR:
        return a ^ b
    return smaller(a, b) if op == ReduceOp.MIN else larger(a, b)


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimum; NaN wins, and -0 is less than +0."""
    if a.dtype.kind != "f":
        return np.where(a < b, a, b)
    a_first = (a < b) | ((a == b) & np.signbit(a))
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, np.where(a_first, a, b)))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maximum; NaN wins, and +0 is more than -0."""
    if a.dtype.kind != "f":
        return np.where(a > b, a, b)
    a_first = (a > b) | ((a == b) & ~np.signbit(a))
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, np.where(a_first, a, b)))


def divide(total: np.ndarray, by: int) -> np.ndarray:
    """Divide in the dtype itself; complex numbers part by part."""
    real = total.view(total.real.dtype)
    return (real / real.dtype.type(by)).view(total.dtype)
