"""The element types that tensors may have, by torch's names (without ``torch.``).

numpy has no bfloat16, float8 or complex32: their bytes move as they are, and they are folded through float32
(see ``frogzmq.fold``). The types that torch stores and cannot compute with are moved only. Quantised
types are not here: their tensors carry a scale beside the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from frogzmq.errors import WireError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: ``name`` as torch writes it, ``itemsize`` in bytes, numpy's name or None."""

    name: str
    itemsize: int
    numpy: str | None
    kind: str
    """``float``; ``half`` and ``quarter`` (2 and 1 bytes, fold in float32); ``int``; ``bool``; ``complex``;
    or ``opaque`` (bytes only)."""


_TABLE = (
    DType("float32", 4, "float32", "float"),
    DType("float64", 8, "float64", "float"),
    DType("float16", 2, "float16", "half"),
    DType("bfloat16", 2, None, "half"),
    DType("int8", 1, "int8", "int"),
    DType("uint8", 1, "uint8", "int"),
    DType("int16", 2, "int16", "int"),
    DType("uint16", 2, "uint16", "int"),
    DType("int32", 4, "int32", "int"),
    DType("uint32", 4, "uint32", "int"),
    DType("int64", 8, "int64", "int"),
    DType("uint64", 8, "uint64", "int"),
    DType("bool", 1, "bool", "bool"),
    DType("complex64", 8, "complex64", "complex"),
    DType("complex128", 16, "complex128", "complex"),
    DType("complex32", 4, None, "complex"),
    DType("float8_e4m3fn", 1, None, "quarter"),
    DType("float8_e5m2", 1, None, "quarter"),
    DType("float8_e4m3fnuz", 1, None, "quarter"),
    DType("float8_e5m2fnuz", 1, None, "quarter"),
    # Powers of two, without a zero or a sign: scales of other tensors, whose sum would mean nothing.
    DType("float8_e8m0fnu", 1, None, "opaque"),
    DType("float4_e2m1fn_x2", 1, None, "opaque"),
    *(DType(f"{sign}int{bits}", 1, None, "opaque") for sign in ("", "u") for bits in range(1, 8)),
    *(DType(f"bits{shape}", 1, None, "opaque") for shape in ("8", "1x8", "2x4", "4x2")),
    DType("bits16", 2, None, "opaque"),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}


def dtype_of(name: str) -> DType:
    """Return the table's row for ``name``; ``WireError`` where there is none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise WireError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None
