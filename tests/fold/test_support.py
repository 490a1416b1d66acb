"""Which cells are refused, and that the refusal names what it refuses."""

from __future__ import annotations

import pytest

from frogzmq.dtypes import DTYPES, dtype_of
from frogzmq.fold.support import CELLS, refusal
from frogzmq.types import OpKind, ReduceOp


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", list(ReduceOp)[1:])
@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.REDUCE])
def test_refusal_names_dtype_and_op(kind, op, dtype):
    text = refusal(kind, op, dtype)
    if op in CELLS[dtype.kind]:
        assert text is None
    else:
        assert dtype.name in text
        assert op.name in text


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.ALL_GATHER])
def test_every_dtype_moves(kind, dtype):
    assert refusal(kind, ReduceOp.NONE, dtype) is None
    assert "SUM" in refusal(kind, ReduceOp.SUM, dtype)


@pytest.mark.parametrize(
    ("name", "ops"),
    [("float32", "SUM AVG PRODUCT MIN MAX PREMUL_SUM"), ("bfloat16", "SUM AVG PRODUCT MIN MAX PREMUL_SUM"),
     ("int8", "SUM PRODUCT MIN MAX BAND BOR BXOR"), ("bool", "SUM PRODUCT MIN MAX BAND BOR BXOR"),
     ("complex128", "SUM AVG PRODUCT PREMUL_SUM"), ("complex32", "SUM AVG PRODUCT PREMUL_SUM"),
     ("float8_e4m3fn", "SUM AVG PRODUCT MIN MAX PREMUL_SUM"), ("float8_e8m0fnu", ""), ("uint4", "")],
)  # fmt: skip
def test_the_table(name, ops):
    assert {op.name for op in CELLS[dtype_of(name).kind]} == set(ops.split())


def test_average_of_integers_says_what_to_do():
    assert "SUM and divide" in refusal(OpKind.ALL_REDUCE, ReduceOp.AVG, dtype_of("int64"))


def test_folding_without_an_op_is_refused():
    assert "NONE" in refusal(OpKind.ALL_REDUCE, ReduceOp.NONE, dtype_of("float32"))
