"""Widening and narrowing of halves: every float16, every tie between two of them, and random bits."""

from __future__ import annotations

import numpy as np
import pytest
from support.reference import nearest_bfloat16

from frogzmq.fold import halves

ALL = np.arange(1 << 16, dtype=np.uint16)


def blocks(size: int):
    """Slices of at most one block."""
    return (slice(start, start + halves.BLOCK) for start in range(0, size, halves.BLOCK))


def narrow(function, values: np.ndarray) -> np.ndarray:
    """Narrow a copy block by block, as the kernels do."""
    out, scratch = np.empty(values.size, np.uint16), halves.Scratch(halves.BLOCK)
    with np.errstate(all="ignore"):
        for block in blocks(values.size):
            function(values[block].copy(), out[block], scratch)
    return out


def neighbourhood(exact: np.ndarray) -> np.ndarray:
    """float32 values with the next lower and higher bit pattern of each."""
    bits = exact.astype(np.float32).view(np.uint32)
    return np.concatenate([bits, bits - np.uint32(1), bits + np.uint32(1)]).view(np.float32)


def random_bits(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def numpy_float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7E00), bits)


def test_every_float16_widens_as_numpy_does():
    out = np.empty(ALL.size, np.float32)
    halves.widen_float16(ALL, out, halves.Scratch(ALL.size))
    assert np.array_equal(out.view(np.uint32), ALL.view(np.float16).astype(np.float32).view(np.uint32))


def test_every_float16_comes_back():
    out = np.empty(ALL.size, np.float32)
    halves.widen_float16(ALL, out, halves.Scratch(ALL.size))
    back = narrow(halves.narrow_float16, out)
    assert np.array_equal(back, np.where(np.isnan(ALL.view(np.float16)), np.uint16(0x7E00), ALL))


def test_every_tie_of_float16_rounds_to_even():
    finite = ALL[np.isfinite(ALL.view(np.float16))].view(np.float16).astype(np.float64)
    finite = np.unique(np.append(finite, [65536.0, -65536.0]))
    values = neighbourhood((finite[1:] + finite[:-1]) / 2)
    assert np.array_equal(narrow(halves.narrow_float16, values), numpy_float16(values))


def test_random_floats_narrow_to_float16_as_numpy_does():
    rng = np.random.default_rng(8)
    spread = rng.standard_normal(400_000) * 10.0 ** rng.uniform(-9, 6, 400_000)
    values = np.concatenate([random_bits(600_000), spread.astype(np.float32)])
    assert np.array_equal(narrow(halves.narrow_float16, values), numpy_float16(values))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 1000, 65_535, 65_536])
def test_every_bfloat16_comes_back(size):
    source = ALL[ALL.size - size :]
    wide, back, scratch = np.empty(size, np.float32), np.empty(size, np.uint16), halves.Scratch(halves.BLOCK)
    halves.widen_bfloat16(source, wide, scratch)
    expected = (source.astype(np.uint32) << 16).view(np.float32)
    same = np.sort(wide.view(np.uint32)) == np.sort(expected.view(np.uint32))
    assert same.all(), "the values are the same, if in another order"
    halves.narrow_bfloat16(wide, back, scratch)
    assert np.array_equal(back, np.where(np.isnan(expected), np.uint16(0x7FC0), source))


def paired(values: np.ndarray) -> np.ndarray:
    """Put values in the order in which ``widen_bfloat16`` leaves them (an even number, little endian)."""
    return np.concatenate([values[0::2], values[1::2]])


def test_every_tie_of_bfloat16_rounds_to_even():
    ties = ((ALL.astype(np.uint32) << 16) | 0x8000).view(np.float32)
    values = neighbourhood(ties)
    out, scratch = np.empty(values.size, np.uint16), halves.Scratch(halves.BLOCK)
    for block in blocks(values.size):
        halves.narrow_bfloat16(paired(values[block]), out[block], scratch)
    with np.errstate(all="ignore"):
        assert np.array_equal(out, nearest_bfloat16(values))


def test_random_floats_narrow_to_the_nearest_bfloat16():
    values = random_bits(600_000)
    out, scratch = np.empty(values.size, np.uint16), halves.Scratch(halves.BLOCK)
    for block in blocks(values.size):
        halves.narrow_bfloat16(paired(values[block]), out[block], scratch)
    with np.errstate(all="ignore"):
        assert np.array_equal(out, nearest_bfloat16(values))
