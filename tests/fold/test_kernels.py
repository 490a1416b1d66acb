"""Every kernel cell against the dumb reference, wherever the bytes lie and whichever input is the output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import level
from support.samples import cell_id, cells, sample

from frogzmq.dtypes import DTYPES, dtype_of
from frogzmq.errors import WireError
from frogzmq.fold.kernels import fold_into
from frogzmq.types import ReduceOp

BEYOND_BLOCKS = 140_001
"""Elements: several blocks of every kernel, and a rest that fills no vector."""


def shifted(data: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins ``offset`` bytes after an aligned address."""
    room = np.zeros(data.size + 64, np.uint8)
    start = (-room.__array_interface__["data"][0]) % 64 + offset
    view = room[start : start + data.size] if start + data.size <= room.size else room[: data.size]
    view[:] = data
    return view


@pytest.mark.parametrize("cell", cells(), ids=cell_id)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, BEYOND_BLOCKS])
def test_cell_equals_reference(cell, numel):
    dtype, op = cell
    count = 3 if numel == BEYOND_BLOCKS else 5
    inputs = [sample(dtype, numel, seed) for seed in range(count)]
    divide_by = count if op == ReduceOp.AVG else 0
    for used in range(2, count + 1):
        out = np.full(numel * dtype.itemsize, 0xA5, np.uint8)
        fold_into(out, inputs[:used], dtype, op, divide_by)
        assert out.tobytes() == level(inputs[:used], dtype, op, divide_by).tobytes(), used


@settings(max_examples=200)
@given(data=st.data())
def test_aliases_and_alignment_change_nothing(data):
    dtype, op = data.draw(st.sampled_from(cells()))
    count = data.draw(st.integers(2, 5))
    numel = data.draw(st.integers(1, 300))
    inputs = [sample(dtype, numel, data.draw(st.integers(0, 1 << 30))) for _ in range(count)]
    expected = level(inputs, dtype, op, count if op == ReduceOp.AVG else 0)
    placed = [shifted(x, data.draw(st.integers(0, 17))) for x in inputs]
    place = data.draw(st.integers(0, count))
    out = placed[place] if place < count else shifted(np.zeros_like(inputs[0]), data.draw(st.integers(0, 17)))
    fold_into(out, placed, dtype, op, count if op == ReduceOp.AVG else 0)
    assert out.tobytes() == expected.tobytes()
    for index, (x, before) in enumerate(zip(placed, inputs, strict=True)):
        assert index == place or x.tobytes() == before.tobytes(), "an input was written"


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e5m2", "int64"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_output_may_be_any_input_across_blocks(name, place):
    dtype = dtype_of(name)
    inputs = [sample(dtype, BEYOND_BLOCKS, seed) for seed in range(4)]
    expected = level(inputs, dtype, ReduceOp.SUM)
    fold_into(inputs[place], inputs, dtype, ReduceOp.SUM)
    assert np.array_equal(inputs[place], expected)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_nans_do_not_tell_where_they_lay(name, op):
    """An addition of two NaNs hands on either, depending on place and processor; a fold must not."""
    dtype = dtype_of(name)
    if dtype.kind == "complex" and op in (ReduceOp.MIN, ReduceOp.MAX):
        pytest.skip("complex numbers have no order")
    bits, first, second = {
        "float32": ("u4", 0x7FC00001, 0xFFC00002), "complex64": ("u4", 0x7FC00001, 0xFFC00002),
        "float64": ("u8", 0x7FF8000000000001, 0xFFF8000000000002),
        "float16": ("u2", 0x7E01, 0xFE02), "bfloat16": ("u2", 0x7FC1, 0xFFC2),
    }[name]  # fmt: skip
    seen = set()
    for numel in (*range(1, 40), 1003):
        count = numel * (2 if dtype.kind == "complex" else 1)
        a, b = (np.full(count, value, bits).view(np.uint8) for value in (first, second))
        for inputs in ([a, b], [b, a], [shifted(a, 1), b]):
            for out in (np.empty_like(a), inputs[0].copy()):
                fold_into(out, inputs, dtype, op)
                seen.update(out.view(bits).tolist())
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_zeros_have_an_order(name):
    dtype = dtype_of(name)
    top = np.uint64(1 << (8 * dtype.itemsize - 1)).astype(f"u{dtype.itemsize}")
    minus, plus = np.full(50, top).view(np.uint8), np.zeros(50 * dtype.itemsize, np.uint8)
    for inputs in ([minus, plus], [plus, minus]):
        out = np.empty_like(plus)
        fold_into(out, inputs, dtype, ReduceOp.MAX)
        assert out.tobytes() == plus.tobytes()
        fold_into(out, inputs, dtype, ReduceOp.MIN)
        assert out.tobytes() == minus.tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_one_input_is_copied_bit_by_bit(dtype):
    data = np.random.default_rng(3).integers(0, 256, 48 * dtype.itemsize, dtype=np.uint8)
    out = np.zeros_like(data)
    fold_into(out, [data], dtype, ReduceOp.NONE)
    assert out.tobytes() == data.tobytes()
    fold_into(data, [data], dtype, ReduceOp.NONE)
    assert out.tobytes() == data.tobytes()


def test_halves_round_once_and_not_after_every_addition():
    dtype = dtype_of("float16")
    # In float16 2048 + 1 is 2048, so rounding after every addition would lose both ones.
    inputs = [np.array([value], np.float16).view(np.uint8) for value in (2048, 1, 1)]
    out = np.empty(2, np.uint8)
    fold_into(out, inputs, dtype, ReduceOp.SUM)
    assert out.view(np.float16)[0] == 2050


def test_half_average_divides_before_it_rounds():
    dtype = dtype_of("float16")
    inputs = [np.array([65504], np.float16).view(np.uint8)] * 4
    out = np.empty(2, np.uint8)
    fold_into(out, inputs, dtype, ReduceOp.AVG, 4)
    assert out.view(np.float16)[0] == 65504, "the sum does not fit float16, the average does"


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("by", [1, 2, 3, 4, 7, 8, 1000, 1024])
def test_averages_are_quotients_down_to_the_subnormals(name, by):
    dtype = dtype_of(name)
    inputs = [sample(dtype, 2000, seed) for seed in range(2)]
    tiny = np.arange(256 * 16, dtype=np.uint32).view(np.uint8)[: inputs[0].size // 32 * 16]
    inputs[0][: tiny.size], inputs[1][: tiny.size] = tiny, 0
    for used in (1, 2):
        out = np.empty_like(inputs[0])
        fold_into(out, inputs[:used], dtype, ReduceOp.AVG, by)
        assert out.tobytes() == level(inputs[:used], dtype, ReduceOp.AVG, by).tobytes()


def test_order_is_left_to_right():
    dtype = dtype_of("float32")
    big, one = (np.array([value], np.float32).view(np.uint8) for value in (1e8, 1.0))
    minus = np.array([-1e8], np.float32).view(np.uint8)
    out = np.empty(4, np.uint8)
    fold_into(out, [big, minus, one], dtype, ReduceOp.SUM)
    assert out.view(np.float32)[0] == 1
    fold_into(out, [big, one, minus], dtype, ReduceOp.SUM)
    assert out.view(np.float32)[0] == 0


def test_bool_takes_any_byte_but_zero_for_true():
    dtype = dtype_of("bool")
    two, one = np.array([2, 2, 0], np.uint8), np.array([1, 0, 0], np.uint8)
    out = np.empty(3, np.uint8)
    fold_into(out, [two, one], dtype, ReduceOp.BAND)
    assert out.tolist() == [1, 0, 0]
    fold_into(out, [two, one], dtype, ReduceOp.SUM)
    assert out.tolist() == [1, 1, 0]


def test_infinities_and_overflow_do_not_warn():
    # pytest turns warnings into errors here.
    dtype = dtype_of("float32")
    a = np.array([np.inf, 3e38, np.nan], np.float32).view(np.uint8)
    b = np.array([-np.inf, 3e38, 1], np.float32).view(np.uint8)
    out = np.empty_like(a)
    fold_into(out, [a, b], dtype, ReduceOp.SUM)
    assert np.isnan(out.view(np.float32)[[0, 2]]).all()
    assert np.isinf(out.view(np.float32)[1])


@pytest.mark.parametrize(
    ("name", "op", "divide_by"),
    [("float32", ReduceOp.BAND, 0), ("int32", ReduceOp.AVG, 0), ("int32", ReduceOp.SUM, 2),
     ("complex64", ReduceOp.MAX, 0), ("float8_e8m0fnu", ReduceOp.SUM, 0), ("bool", ReduceOp.AVG, 0),
     ("float32", ReduceOp.NONE, 0)],
)  # fmt: skip
def test_unsupported_cells_are_refused_by_name(name, op, divide_by):
    data = np.zeros(16, np.uint8)
    with pytest.raises(WireError, match=name):
        fold_into(data.copy(), [data, data], dtype_of(name), op, divide_by)


def test_only_sums_are_divided():
    data = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="PRODUCT"):
        fold_into(data.copy(), [data, data], dtype_of("complex64"), ReduceOp.PRODUCT, 2)


def test_lengths_must_fit():
    a, b = np.zeros(8, np.uint8), np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="float32"):
        fold_into(a.copy(), [a, b], dtype_of("float32"), ReduceOp.SUM)
    with pytest.raises(ValueError, match="float64"):
        fold_into(b.copy(), [b, b], dtype_of("float64"), ReduceOp.SUM)
    with pytest.raises(ValueError, match="at least one"):
        fold_into(a, [], dtype_of("float32"), ReduceOp.SUM)


def test_a_barrier_folds_nothing():
    empty = np.zeros(0, np.uint8)
    fold_into(empty, [empty, empty, empty], dtype_of("uint8"), ReduceOp.NONE)
