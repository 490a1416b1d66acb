"""Half precision and bfloat16 to float32 and back, exactly, in plain numpy integer passes.

numpy converts float16 one element at a time and has no bfloat16. Widening float16 puts its bits where
float32 has them and lets one exact multiplication move the exponent, of subnormals too. Narrowing rounds to
nearest, ties to even, as IEEE 754 asks, by letting one float32 addition round: the
sum of ``x`` and a power of two 13 binades above it has exactly float16's last place. bfloat16 is widened
two elements at a time, so the float32 values stand in another order (``narrow_bfloat16`` restores it);
a fold does not care. All work happens in scratch of at most ``BLOCK`` elements.

Narrowing turns every NaN into the quiet NaN with positive sign. Callers silence numpy's floating-point
warnings: NaN and infinity are values here.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from frogzmq.fold.arithmetic import has_nan

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

BLOCK = 1 << 16
"""Elements handled at a time: enough that a numpy call's fixed cost does not count."""

# Constant arrays: numpy's minimum and maximum are four times slower with a scalar operand.
_SMALLEST_NORMAL: F32 = np.full(BLOCK, 2.0**-14, np.float32)
_INFINITE = np.float32(2.0**16)
"""What rounds to infinity may as well be the first power of two beyond float16."""
_INFINITE_BITS = 0x47800000
_REBIAS = np.float32(2.0**112)
"""Exponents count from 127 in float32 and from 15 in float16."""

_ABS = np.uint32(0x7FFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_ABOVE = np.uint32(13 << 23)
"""Exponent distance 13: float32 has 23 fraction bits, float16 has 10."""
_BIAS16 = np.uint16((13 + 127 - 15 + 1) << 10 & 0xFFFF)
_SIGN16 = np.uint16(0x8000)
_NAN16 = np.uint16(0x7E00)
_UPPER = np.uint32(0xFFFF0000)
_HALF_PLACE = np.uint32(0x7FFF)
_SIGN_AND_HALF = np.int32(-0x70002000)
"""A float16 shifted up by 13, its sign in the uppermost bit."""
_NOT_FINITE16 = np.uint16(0xF800)
_ONE16 = np.uint16(1)
_ONE, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)
_13I, _EXPONENT_I = np.int32(13), np.int32(0x7F800000)


class Scratch:
    """Temporaries for blocks of up to ``size`` elements; one thread at a time."""

    def __init__(self, size: int) -> None:
        self.words = np.empty(size, np.uint32)
        self.halves = np.empty(size, np.uint16)

    @cached_property
    def index(self) -> NDArray[np.intp]:
        """For lookups in a table."""
        return np.empty(self.words.size, np.intp)


def widen_float16(source: U16, out: F32, scratch: Scratch) -> None:
    """Write the float32 values of float16 bits."""
    bits, magnitude = out.view(np.int32), scratch.halves[: source.size]
    np.copyto(bits, source.view(np.int16))  # the sign fills the upper half
    np.left_shift(bits, _13I, out=bits)
    np.bitwise_and(bits, _SIGN_AND_HALF, out=bits)
    np.multiply(out, _REBIAS, out=out)
    np.left_shift(source, _ONE16, out=magnitude)
    if magnitude.size and magnitude.max() >= _NOT_FINITE16:
        np.bitwise_or(bits, _EXPONENT_I, out=bits, where=magnitude >= _NOT_FINITE16)


def narrow_float16(source: F32, out: U16, scratch: Scratch) -> None:
    """Round float32 to float16 bits. ``source`` is overwritten."""
    size = source.size
    if not size:
        return
    bits = source.view(np.uint32)
    sign, power = scratch.halves[:size], scratch.words[:size]
    np.right_shift(bits, _16, out=power)  # contiguous passes: numpy takes every second half slowly
    np.copyto(sign, power, casting="unsafe")
    np.bitwise_and(sign, _SIGN16, out=sign)
    np.bitwise_and(bits, _ABS, out=bits)
    wrong = None
    if bits.max() >= _INFINITE_BITS:
        wrong = np.isnan(source)
        np.minimum(source, _INFINITE, out=source)
    floor = power.view(np.float32)
    np.maximum(source, _SMALLEST_NORMAL[:size], out=floor)  # subnormals have the last place of 2**-14
    np.bitwise_and(power, _EXPONENT, out=power)
    np.add(power, _ABOVE, out=power)
    np.add(source, floor, out=source)
    # The sum is the power plus the rounded significand, hidden bit included, in its lowest bits: the
    # exponent moved down to float16's place adds to it, and casting drops the exponent above.
    np.right_shift(bits, _13, out=power)
    np.add(bits, power, out=bits)
    np.copyto(out, bits, casting="unsafe")
    np.subtract(out, _BIAS16, out=out)
    np.bitwise_or(out, sign, out=out)
    if wrong is not None:
        out[wrong] = _NAN16


def widen_bfloat16(source: U16, out: F32, scratch: Scratch) -> None:
    """Write the float32 values of bfloat16 bits: lower halves of words, then upper ones, then a last one."""
    pairs = source.size // 2
    words, bits = source[: 2 * pairs].view(np.uint32), out.view(np.uint32)
    np.left_shift(words, _16, out=bits[:pairs])
    np.bitwise_and(words, _UPPER, out=bits[pairs : 2 * pairs])
    if source.size % 2:
        bits[-1] = int(source[-1]) << 16


def narrow_bfloat16(source: F32, out: U16, scratch: Scratch) -> None:
    """Round float32, in ``widen_bfloat16``'s order, to bfloat16 bits. ``source`` is overwritten."""
    if has_nan(source):
        source[np.isnan(source)] = np.nan
    bits = source.view(np.uint32)
    odd = scratch.words[: source.size]
    np.right_shift(bits, _16, out=odd)
    np.bitwise_and(odd, _ONE, out=odd)
    np.add(bits, _HALF_PLACE, out=bits)
    np.add(bits, odd, out=bits)
    pairs = source.size // 2
    lower, upper = bits[:pairs], bits[pairs : 2 * pairs]
    np.right_shift(lower, _16, out=lower)
    np.bitwise_and(upper, _UPPER, out=upper)
    np.bitwise_or(lower, upper, out=out[: 2 * pairs].view(np.uint32))
    if source.size % 2:
        out[-1] = int(bits[-1]) >> 16
