"""Folding as Gloo's ring does, against a plain model that goes element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frogzmq.dtypes import dtype_of
from frogzmq.fold.gloo import fold_ring
from frogzmq.types import ReduceOp

SUM, PRODUCT, MIN, MAX = ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16}
SPECIAL = [0.0, -0.0, 1.0, -1.5, 6e-8, -1e-40, 65504.0, 3e38, float("inf"), float("-inf"), float("nan")]


def step(local, received, op: ReduceOp):
    """What a rank makes of its own value and the one that it was sent."""
    if op == MAX:
        return received if local < received else local
    if op == MIN:
        return received if received < local else local
    if np.isnan(local):
        return local
    if np.isnan(received):
        return received
    return local * received if op == PRODUCT else local + received


def as_float32(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)


def rounded(value: np.float32) -> int:
    """The bfloat16 nearest to a float32, even of two; there is one NaN."""
    bits = int(value.view(np.uint32))
    return 0x7FC0 if np.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@st.composite
def columns(draw):
    world, n = draw(st.integers(2, 6)), draw(st.integers(1, 40))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    return np.array(draw(st.lists(st.lists(value, min_size=n, max_size=n), min_size=world, max_size=world)))


@pytest.mark.parametrize("op", [SUM, PRODUCT, MIN, MAX], ids=lambda op: op.name)
@pytest.mark.parametrize("name", NUMPY)
@settings(max_examples=25, deadline=None)
@given(columns())
def test_as_the_ring_does(name: str, op: ReduceOp, values) -> None:
    with np.errstate(all="ignore"):
        rows = values.astype(NUMPY[name])
        expected = rows[0].copy()
        for row in rows[1:]:
            for i, local in enumerate(row):
                expected[i] = step(local, expected[i], op)
    out = np.empty(rows[0].nbytes, np.uint8)
    fold_ring(out, [row.view(np.uint8) for row in rows], dtype_of(name), op)
    got = out.view(NUMPY[name])
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("op", [SUM, PRODUCT, MIN, MAX], ids=lambda op: op.name)
@settings(max_examples=25, deadline=None)
@given(columns())
def test_bfloat16_is_rounded_after_every_step(op: ReduceOp, values) -> None:
    with np.errstate(all="ignore"):
        rows = [[rounded(value) for value in row] for row in values.astype(np.float32)]
        expected = list(rows[0])
        for row in rows[1:]:
            for i, local in enumerate(row):
                made = step(as_float32(local), as_float32(expected[i]), op)
                expected[i] = rounded(np.float32(made))
    out = np.empty(2 * len(expected), np.uint8)
    fold_ring(out, [np.array(row, np.uint16).view(np.uint8) for row in rows], dtype_of("bfloat16"), op)
    assert out.view(np.uint16).tolist() == expected


@pytest.mark.parametrize(("name", "unsigned", "quiet"), [
    ("float32", np.uint32, 0x7FC00000), ("float64", np.uint64, 0x7FF8 << 48),
])  # fmt: skip
@pytest.mark.parametrize("op", [SUM, PRODUCT], ids=lambda op: op.name)
def test_of_two_nans_the_local_one_is_handed_on_at_every_place(name, unsigned, quiet, op) -> None:
    for n in range(1, 70):
        rows = [np.full(n, quiet + 5 + rank, unsigned) for rank in range(3)]
        rows[1] |= unsigned(1 << (8 * rows[1].itemsize - 1))
        out = rows[0].view(np.uint8)  # one of the inputs
        fold_ring(out, [row.view(np.uint8) for row in rows], dtype_of(name), op)
        assert set(out.view(unsigned).tolist()) == {quiet + 7}


def test_a_signalling_nan_comes_out_quiet() -> None:
    rows = [np.array([0x7F800000 + 3 + rank], np.uint32) for rank in range(2)]
    out = np.empty(4, np.uint8)
    fold_ring(out, [row.view(np.uint8) for row in rows], dtype_of("float32"), SUM)
    assert out.view(np.uint32)[0] == 0x7FC00004


def test_integers_wrap() -> None:
    rows = [np.array([200, 7], np.uint8), np.array([100, 8], np.uint8)]
    out = np.empty(2, np.uint8)
    fold_ring(out, rows, dtype_of("uint8"), SUM)
    assert out.tolist() == [44, 15]
