"""Between tensors and bytes: where a tensor's memory can be used as it is, and copies where it cannot.

Bytes stand for elements in logical (row-major) order, whatever the strides: ranks may differ in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from frogzmq.backend.errors import BadTensor, UnsupportedType
from frogzmq.backend.staging import Landing, fetch
from frogzmq.dtypes import DTYPES, DType

Bytes: TypeAlias = npt.NDArray[np.uint8]

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, name): row for name, row in DTYPES.items() if hasattr(torch, name)
}
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    dtype: torch.uint8 if row.itemsize == 1 else torch.int16
    for dtype, row in _DTYPES.items()
    if row.kind == "opaque"
}
"""torch stores these and cannot copy all of them between strides: their bits travel as integers."""


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """Our name of the tensor's dtype; ``UnsupportedType`` where it has none, or is not dense."""
    if tensor.is_nested:
        raise UnsupportedType(
            f"{what}: nested tensors are not supported; pass their parts (.unbind()) or .to_padded_tensor()"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedType(
            f"{what}: {tensor.layout} tensors are not supported; call .to_dense() before the collective"
        )
    row = _DTYPES.get(tensor.dtype)
    if tensor.is_quantized:
        raise UnsupportedType(
            f"{what}: quantised tensors ({tensor.dtype}) are not supported: their scale is not among their "
            "bytes; pass .int_repr() or .dequantize()"
        )
    if row is None:
        raise UnsupportedType(f"{what}: dtype {tensor.dtype} is not supported; known: {', '.join(DTYPES)}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedType(f"{what}: tensors on {tensor.device} are not supported, only cpu and cuda")
    return row.name


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, read from start to end, is its elements in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _Memory:
    """Lends a tensor's memory to numpy, and keeps the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def as_bytes(plain: torch.Tensor) -> Bytes:
    """The memory of a plain CPU tensor as a one-dimensional byte array (no copy; keeps it alive)."""
    size = plain.nbytes
    if not size:
        return np.empty(0, np.uint8)
    # Not `.numpy()`: it takes three times as long, knows fewer dtypes, and forbids the storage to be resized
    # ever after, which FSDP does to its parameters.
    return np.asarray(_Memory(plain, size))


def read(tensor: torch.Tensor) -> Bytes:
    """The tensor's elements in order, as bytes: its own memory if plain, else a copy made now."""
    if is_plain(tensor):
        return as_bytes(tensor)
    tensor = _carried(tensor.detach())
    if tensor.is_cuda:
        return as_bytes(fetch(tensor))
    return as_bytes(tensor.resolve_conj().resolve_neg().contiguous())


def touches(output: torch.Tensor, start: int, end: int) -> bool:
    """Whether the output may be written anywhere in the memory ``start:end``."""
    if output.is_contiguous():
        return output.data_ptr() < end and start < output.data_ptr() + output.nbytes
    storage = output.untyped_storage()
    return storage.data_ptr() < end and start < storage.data_ptr() + storage.nbytes()


def apart(tensor: torch.Tensor, output: torch.Tensor) -> Bytes:
    """``read``, but a copy made now where the output may be written into the tensor's own memory: the front
    of a result may stand there before the last of the tensor has been read."""
    data = read(tensor)
    if is_plain(tensor) and touches(output, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes):
        return data.copy()
    return data


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that torch can copy."""
    carrier = _CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else tensor.view(carrier)


def check_output(tensor: torch.Tensor, what: str) -> None:
    """``BadTensor`` where elements (may) share memory, as expanded ones do: writing them has no meaning."""
    reach = 0
    axes = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    for stride, count in axes if tensor.numel() else ():
        # Smaller strides first: each axis must step beyond everything that the ones before it reach.
        if stride <= reach:
            raise BadTensor(
                f"{what}: the output tensor of shape {tuple(tensor.shape)} and strides "
                f"{tuple(tensor.stride())} has elements that share memory (an expanded tensor?); pass a "
                ".clone() or .contiguous() of it"
            )
        reach += stride * (count - 1)


def write_into(tensors: Sequence[torch.Tensor], what: str) -> tuple[list[Bytes], Callable[[], None] | None]:
    """Where result bytes for ``tensors`` go, and what puts them into place afterwards (None: nothing)."""
    sinks: list[Bytes] = []
    later: list[Callable[[], None]] = []
    for tensor in tensors:
        if is_plain(tensor):
            sinks.append(as_bytes(tensor))
            continue
        check_output(tensor, what)
        landing = _landing(_carried(tensor.detach()))
        later.append(landing.put)
        sinks.append(as_bytes(landing.staged))
    if not later:
        return sinks, None
    return sinks, lambda: _all(later)


def _all(later: list[Callable[[], None]]) -> None:
    for put in later:
        put()


def _landing(tensor: torch.Tensor) -> Landing | HostLanding:
    return Landing(tensor) if tensor.is_cuda else HostLanding(tensor)


class HostLanding:
    """Where a result for a tensor with gaps or in another order is collected, and the way from there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.staged = torch.empty(tensor.shape, dtype=tensor.dtype)

    def put(self) -> None:
        """Copy into the tensor's strides."""
        with torch.inference_mode(self._tensor.is_inference()):  # only there may such a tensor be written
            self._tensor.copy_(self.staged)
