"""Every dtype of torch in every reduce op and collective: right, or refused before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "DTYPES.md"
R = dist.ReduceOp
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTORS = (0.5, 2.0, -1.0)
"""Of each rank in turn, for PREMUL_SUM."""
MOVES = ("broadcast", "all_gather", "all_gather_into_tensor")
QUARTERS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
SIZE = 3
Cell = tuple[str, str, str]
"""dtype, collective, reduce op (or nothing)."""


def dtypes() -> list[torch.dtype]:
    """All that this torch has, the common ones first."""
    found = {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    first = [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
    ]
    first += ["int64", "uint64", "bool", "complex64", "complex128", "complex32"]
    names = {str(dtype).removeprefix("torch."): dtype for dtype in found}
    rest = sorted(names.keys() - set(first), key=lambda n: (not n.startswith("float"), n))
    return [names[name] for name in [*first, *rest] if name in names]


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: small numbers, whose sums and products are exact in every type, in float8 too."""
    numbers = torch.tensor([rank + 1, 2, 3 - rank, rank % 2, 0, 4])
    name = str(dtype)
    if name.startswith(("torch.qint", "torch.quint")):
        return torch._empty_affine_quantized([6], scale=1.0, zero_point=0, dtype=dtype)
    if dtype.is_complex:
        return torch.complex(numbers.float(), 1.0 - numbers).to(dtype)
    try:
        return numbers.float().to(dtype)
    except (RuntimeError, NotImplementedError):  # types that torch stores and does nothing else with
        return numbers.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)


def locally(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """torch's own result without any ranks."""
    if tensors[0].dtype in (torch.uint16, torch.uint32, torch.uint64):
        # torch cannot add or compare these on a CPU; numpy can.
        kinds = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
        kinds |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
        total = tensors[0].numpy()
        for tensor in tensors[1:]:
            total = kinds[op](total, tensor.numpy())
        return torch.from_numpy(total)
    own = tensors[0].dtype
    wider = torch.complex64 if own == torch.complex32 else torch.float32
    if own == torch.complex32 or (own.is_floating_point and own.itemsize == 1):
        # torch divides only wider complex numbers, and does not compute with float8 at all.
        return locally(op, [tensor.to(wider) for tensor in tensors]).to(own)
    if op == "PREMUL_SUM":
        tensors = [tensor * factor for tensor, factor in zip(tensors, FACTORS, strict=True)]
    fold: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add, "AVG": torch.add, "PREMUL_SUM": torch.add, "PRODUCT": torch.mul,
        "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    total = tensors[0]
    for tensor in tensors[1:]:
        total = fold[op](total, tensor)
    return total / len(tensors) if op == "AVG" else total


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values of equal type; by their bits, which every dtype has (-0 is not told from 0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.is_floating_point and a.element_size() > 1:
        return torch.equal(a, b)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def reduce_op(op: str, rank: int) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(FACTORS[rank]) if op == "PREMUL_SUM" else getattr(R, op)


def attempt(rank: int, dtype: torch.dtype, what: str, op: str) -> str:
    """One cell on this rank: ``right``, ``wrong``, or the text of the error."""
    ranks = range(SIZE)
    mine = given(rank, dtype)
    try:
        if what == "broadcast":
            dist.broadcast(mine, 1)
            good = same(mine, given(1, dtype))
        elif what == "all_gather":
            outs = [torch.empty_like(mine) for _ in ranks]
            dist.all_gather(outs, mine)
            good = all(same(outs[r], given(r, dtype)) for r in ranks)
        elif what == "all_gather_into_tensor":
            out = torch.empty(SIZE * 6, dtype=dtype)
            dist.all_gather_into_tensor(out, mine)
            good = all(same(out[6 * r : 6 * r + 6], given(r, dtype)) for r in ranks)
        elif what == "reduce":
            dist.reduce(mine, 2, reduce_op(op, rank))
            want = locally(op, [given(r, dtype) for r in ranks]) if rank == 2 else given(rank, dtype)
            good = same(mine, want)
        else:
            dist.all_reduce(mine, reduce_op(op, rank))
            good = same(mine, locally(op, [given(r, dtype) for r in ranks]))
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "right" if good else "wrong"


def every_cell(rank: int, size: int) -> dict[Cell, str]:
    cells = {}
    for dtype in dtypes():
        name = str(dtype).removeprefix("torch.")
        for what in MOVES:
            cells[name, what, ""] = attempt(rank, dtype, what, "")
        for what in ("all_reduce", "reduce"):
            for op in OPS:
                cells[name, what, op] = attempt(rank, dtype, what, op)
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last.item() == size  # nothing was left half done
    return cells


@pytest.fixture(scope="module")
def table(pool: Pool) -> dict[Cell, str]:
    """The cells as all ranks see them alike."""
    first, second, third = pool.run(every_cell, [0, 1, 0])
    assert first == second == third
    assert pool.run(every_cell, [0, 0, 0])[1] == first  # and on one machine
    return first


def test_c060_every_cell_equals_torch_or_is_refused_by_name(table: dict[Cell, str]) -> None:
    assert [cell for cell, seen in table.items() if seen == "wrong"] == []
    for (dtype, what, op), seen in table.items():
        if seen != "right":
            assert dtype in seen or (dtype.startswith("complex") and "complex" in seen), (
                dtype,
                what,
                op,
                seen,
            )
            assert op in seen or what in seen, (dtype, what, op, seen)
    for dtype in ("float32", "float64", "float16", "bfloat16", *QUARTERS):
        assert all(table[dtype, "all_reduce", op] == "right" for op in (*OPS[:5], "PREMUL_SUM")), dtype
    for dtype in ("complex32", "complex64", "complex128"):
        assert all(table[dtype, "reduce", op] == "right" for op in (*OPS[:3], "PREMUL_SUM")), dtype
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"):
        assert all(table[dtype, "reduce", op] == "right" for op in OPS[2:8]), dtype
        for op in ("AVG", "PREMUL_SUM"):
            assert f"{op} is not supported" in table[dtype, "all_reduce", op]
    for dtype in dict.fromkeys(dtype for dtype, _, _ in table):
        quantised = dtype.startswith(("qint", "quint"))
        assert all(("quantised" in table[dtype, what, ""]) == quantised for what in MOVES), dtype
        assert all((table[dtype, what, ""] == "right") != quantised for what in MOVES), dtype


def pattern(cell: Cell, text: str) -> str:
    """An error's text with the cell's own names taken out, up to its list of alternatives."""
    text = re.split(r"; known|: it can do|\n", text)[0]
    dtype, what, op = cell
    text = re.sub(rf"^({what}|all_gather)\b", "CALL", text)
    for name, stands in ((f"torch.{dtype}", "DTYPE"), (dtype, "DTYPE"), (f"ReduceOp.{op}", "OP"), (op, "OP")):
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", stands, text)
    return text


def document(table: dict[Cell, str]) -> str:
    """The text of docs/DTYPES.md."""
    marks: dict[str, int] = {}

    def mark(*cells: Cell) -> str:
        seen = []
        for cell in cells:
            text = table[cell]
            if text != "right":
                text = f"refused ({marks.setdefault(pattern(cell, text), len(marks) + 1)})"
            if text not in seen:
                seen.append(text)
        return " / ".join(seen)

    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(dtype for dtype, _, _ in table):
        row = [mark((name, "all_reduce", op), (name, "reduce", op)) for op in OPS]
        row += [
            mark((name, "broadcast", "")),
            mark((name, "all_gather", ""), (name, "all_gather_into_tensor", "")),
        ]
        rows.setdefault(tuple(row), []).append(name)
    lines = [
        "# What each dtype can do",
        "",
        "Written by `pytest tests/backend/test_dtypes.py --rewrite`, from three ranks on two machines; the",
        "same test checks it. *right*: equal to what torch gives for the same tensors in one process (numpy",
        "for uint16, uint32 and uint64, which torch cannot add on a CPU), on every rank. *refused (n)*: an",
        "error before anything is sent, with text n below. Where `all_reduce` and `reduce` differ, both are",
        "given.",
        "",
        "- Integers wrap around as torch's addition does: uint8 200 + 100 = 44, int8 120 + 100 = -36.",
        "- AVG is for floats. For integers torch has no one rule (Gloo fails, NCCL truncates): convert, or",
        "  use SUM and divide as you mean it.",
        "- PREMUL_SUM (`torch.distributed._make_nccl_premul_sum(factor)`, a number or a tensor of one",
        "  element): each rank multiplies its tensor by its own factor before it gives it, as with NCCL. The",
        "  factor is rounded to the dtype, the product once; then it is a SUM.",
        "- bool: SUM, MAX and BOR mean *or*; PRODUCT, MIN and BAND mean *and*; BXOR is *exclusive or*.",
        "- float16, bfloat16, complex32 and float8 fold in float32 and round to nearest even once per level.",
        "- What is too large for float8 becomes what torch 2.13 makes of it: infinity in e5m2, the largest",
        "  value (448) in e4m3fn, NaN in the two fnuz. float8_e8m0fnu holds scales (no zero, no sign) and",
        "  is only moved.",
        "- Every dtype moves whose bytes are all there is to it. A quantised tensor has a scale beside them",
        "  and is refused by name, as are sparse, nested and meta tensors.",
        "- NaN wins in MIN and MAX, as in `torch.minimum` and `torch.maximum`.",
        "- `all_reduce` of complex numbers is of their real and imaginary parts (torch hands them over so).",
        "",
        "| dtype | " + " | ".join(OPS) + " | broadcast | all_gather |",
        "|---" * (len(OPS) + 3) + "|",
        *(f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()),
        "",
        *(f"{number}. `{text}`" for text, number in marks.items()),
    ]
    return "\n".join(lines) + "\n"


def test_c060_the_document_is_up_to_date(table: dict[Cell, str], rewrite: bool) -> None:
    text = document(table)
    if rewrite:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text, "run pytest tests/backend/test_dtypes.py --rewrite"
