"""Half precision and bfloat16 to float32 and back, exactly, in plain numpy integer passes.

numpy converts float16 one element at a time and has no bfloat16. Widening float16 is a table lookup;
narrowing rounds to nearest, ties to even, as IEEE 754 asks, by letting one float32 addition round: the
sum of ``x`` and a power of two 13 binades above it has exactly float16's last place. All work happens in
scratch of the caller's block size, which should fit a core's L2 cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

_TABLE: F32 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_TABLE.flags.writeable = False

_ABS = np.uint32(0x7FFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_SIGN16 = np.uint16(0x8000)
_SMALLEST_NORMAL16 = np.float32(2.0**-14)
_INF16 = np.float32(65536.0)
"""What rounds to infinity may as well be the first power of two beyond float16."""
_ABOVE = np.uint32(13 << 23)
"""Exponent distance 13: float32 has 23 fraction bits, float16 has 10."""
_BIAS16 = np.uint16((13 + 127 - 15 + 1) << 10 & 0xFFFF)


class Scratch:
    """Temporaries for blocks of up to ``size`` elements; one thread at a time."""

    def __init__(self, size: int) -> None:
        self.a = np.empty(size, np.uint32)
        self.b = np.empty(size, np.uint32)
        self.h = np.empty(size, np.uint16)
        self.index = np.empty(size, np.intp)


def widen_float16(source: U16, out: F32, scratch: Scratch) -> None:
    """Write the float32 values of float16 bits."""
    index = scratch.index[: source.size]
    np.copyto(index, source)
    np.take(_TABLE, index, out=out, mode="wrap")  # wrap: the mode without a bounds check that copies


def widen_bfloat16(source: U16, out: F32, scratch: Scratch) -> None:
    """Write the float32 values of bfloat16 bits."""
    bits = out.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, np.uint32(16), out=bits)


def narrow_float16(source: F32, out: U16, scratch: Scratch) -> None:
    """Round float32 to float16 bits; NaN is the caller's business. ``source`` is overwritten."""
    size = source.size
    bits = source.view(np.uint32)
    sign, power = scratch.h[:size], scratch.b[:size]
    np.copyto(sign, bits.view(np.uint16)[_HIGH::2])
    np.bitwise_and(sign, _SIGN16, out=sign)
    np.bitwise_and(bits, _ABS, out=bits)
    np.minimum(source, _INF16, out=source)
    floor = power.view(np.float32)
    np.maximum(source, _SMALLEST_NORMAL16, out=floor)  # subnormals all have the last place of 2**-14
    np.bitwise_and(power, _EXPONENT, out=power)
    np.add(power, _ABOVE, out=power)
    np.add(source, floor, out=source)
    # The sum's bits exceed the power's by the rounded significand, hidden bit included.
    np.subtract(bits, power, out=bits)
    np.right_shift(power, np.uint32(13), out=power)
    np.add(bits, power, out=bits)
    np.copyto(out, bits, casting="unsafe")
    np.subtract(out, _BIAS16, out=out)
    np.bitwise_or(out, sign, out=out)


def narrow_bfloat16(source: F32, out: U16, scratch: Scratch) -> None:
    """Round float32 to bfloat16 bits; NaN is the caller's business. ``source`` is overwritten."""
    bits = source.view(np.uint32)
    odd = scratch.a[: source.size]
    np.right_shift(bits, np.uint32(16), out=odd)
    np.bitwise_and(odd, np.uint32(1), out=odd)
    np.add(bits, np.uint32(0x7FFF), out=bits)
    np.add(bits, odd, out=bits)
    np.right_shift(bits, np.uint32(16), out=bits)
    np.copyto(out, bits, casting="unsafe")


_HIGH = 1 if np.little_endian else 0
