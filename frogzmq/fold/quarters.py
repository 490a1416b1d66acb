"""The float8 formats to float32 and back, by tables.

Widening looks a byte up among 256 values. Narrowing needs no more of a float32 than its upper half and
whether anything of the lower half is set: seven fraction bits and "more follows" decide how three round.
Rounding is to nearest, ties to even. What is too large becomes what torch (2.13) makes of it: infinity in
e5m2, the largest value in e4m3fn (infinity, too), NaN in the two ``uz`` formats. Every NaN becomes the
positive one (the ``uz`` formats have only one).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frogzmq.fold.halves import Scratch

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


class Format(NamedTuple):
    """Fraction bits, exponent bias, first code that is not finite, what rounds there, and NaN."""

    fraction: int
    bias: int
    end: int
    beyond: int
    nan: int
    unsigned_zero: bool


FORMATS = {
    "float8_e4m3fn": Format(3, 7, 0x7F, 0x7E, 0x7F, False),
    "float8_e5m2": Format(2, 15, 0x7C, 0x7C, 0x7F, False),
    "float8_e4m3fnuz": Format(3, 8, 0x80, 0x80, 0x80, True),
    "float8_e5m2fnuz": Format(2, 16, 0x80, 0x80, 0x80, True),
}

_16, _LOWER, _ONE = np.uint32(16), np.uint32(0xFFFF), np.uint32(1)


def converters(name: str) -> tuple[Callable[[U8, F32, Scratch], None], Callable[[F32, U8, Scratch], None]]:
    """``widen`` and ``narrow`` of a format, as in ``frogzmq.fold.halves``."""

    def widen(source: U8, out: F32, scratch: Scratch) -> None:
        _look_up(_values(name), source, out, scratch)

    def narrow(source: F32, out: U8, scratch: Scratch) -> None:
        bits, sticky = source.view(np.uint32), scratch.words[: source.size]
        np.bitwise_and(bits, _LOWER, out=sticky)
        np.minimum(sticky, _ONE, out=sticky)
        np.right_shift(bits, _16, out=bits)
        np.bitwise_or(bits, sticky, out=bits)
        _look_up(_codes(name), bits, out, scratch)

    return widen, narrow


def _look_up(table: NDArray[Any], places: NDArray[Any], out: NDArray[Any], scratch: Scratch) -> None:
    index = scratch.index[: places.size]
    np.copyto(index, places)
    np.take(table, index, out=out, mode="wrap")  # the other modes copy or check first


def _magnitudes(form: Format) -> NDArray[np.float64]:
    """Values of the codes from 0 to ``end``, this included as if it were finite too."""
    codes = np.arange(form.end + 1)
    exponent, fraction = codes >> form.fraction, codes & ((1 << form.fraction) - 1)
    hidden = np.where(exponent > 0, 1 << form.fraction, 0)
    values: NDArray[np.float64] = np.ldexp(
        (hidden + fraction).astype(np.float64), np.maximum(exponent, 1) - form.bias - form.fraction
    )
    return values


@cache
def _values(name: str) -> F32:
    """The float32 value of each of the 256 codes."""
    form = FORMATS[name]
    finite = _magnitudes(form)[: form.end]
    half = np.full(128, np.nan)
    half[: form.end] = finite
    if form.nan > form.end:
        half[form.end] = np.inf
    table = np.concatenate([half, -half]).astype(np.float32)
    if form.unsigned_zero:
        table[form.nan] = np.nan
    return table


@cache
def _codes(name: str) -> U8:
    """The code for each upper half of a float32, its last bit standing also for whatever follows it."""
    form = FORMATS[name]
    magnitudes = _magnitudes(form)
    upper = np.arange(1 << 15, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = (upper << _16).view(np.float32).astype(np.float64)
    # Codes follow each other as their values do, so rounding chooses among consecutive whole numbers.
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    low, high = np.searchsorted(middles, values, "left"), np.searchsorted(middles, values, "right")
    code = np.where(low % 2 == 0, low, high)
    code = np.where(code >= form.end, form.beyond, code)
    code[np.isnan(values)] = form.nan
    special = code == form.nan
    negative = np.where(special | (form.unsigned_zero & (code == 0)), code, code | 0x80)
    return np.concatenate([code, negative]).astype(np.uint8)
