"""all_reduce of sparse (COO) tensors, which embeddings with ``sparse=True`` give under DDP.

Ranks hold different numbers of rows, so they first tell each other how many; then all indices and values are
gathered, and every rank adds them in rank order. The first step is waited for within the call: what
follows needs its outcome, and must have its place in the order of the group's operations.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from frogzmq.backend.errors import BadTensor, UnsupportedType
from frogzmq.backend.joint import JointWork
from frogzmq.backend.tensors import Bytes, as_bytes, dtype_name, read
from frogzmq.backend.work import FrogWork
from frogzmq.client import GroupHandle
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp

_WHAT = "all_reduce of a sparse tensor"
Tensor = torch.Tensor


def all_reduce(group: GroupHandle, tensor: Tensor, reduce: ReduceOp, timeout_s: float | None) -> JointWork:
    """Sum the ranks' sparse tensors in place. ``Mismatch`` where shapes or dtypes differ."""
    if reduce != ReduceOp.SUM:
        raise UnsupportedType(f"{_WHAT}: only SUM is possible, not {reduce.name}")
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedType(
            f"{_WHAT}: {tensor.layout} tensors are not supported; call .to_sparse_coo() or .to_dense()"
        )
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().cpu().contiguous(), mine.values().cpu().contiguous()
    name = dtype_name(values, _WHAT)
    counts = _counts(group, tensor, indices.shape[1], timeout_s)
    shape = values.shape[1:]
    if not sum(counts):
        return JointWork([], [tensor], "all_reduce")
    index_bytes, got_indices = _post(
        group, indices.t().contiguous(), "int64", counts, indices.shape[:1], timeout_s
    )
    value_bytes, got_values = _post(group, values, name, counts, shape, timeout_s)
    return _Summing([index_bytes, value_bytes], tensor, got_indices, got_values)


class _Summing(JointWork):
    """Adds what was gathered, once, when somebody asks for it."""

    def __init__(self, works: list[FrogWork], target: Tensor, indices: Tensor, values: Tensor) -> None:
        super().__init__(works, [target], "all_reduce")
        self._got: tuple[Tensor, Tensor] | None = (indices, values)
        self._adding = threading.Lock()

    def wait(self, timeout: object = None) -> bool:
        """Return True when the sum stands in the tensor."""
        super().wait(timeout)  # type: ignore[arg-type]
        self._sum()
        return True

    def result(self) -> list[Tensor]:
        """The tensor, when done."""
        outputs = super().result()
        self._sum()
        return outputs

    def _finish(self, done: torch.futures.Future[list[object]]) -> list[Tensor]:
        outputs = super()._finish(done)
        self._sum()
        return outputs

    def _sum(self) -> None:
        with self._adding:  # a second thread must not go on before the first one is done
            if self._got is not None:
                self._add(*self._got)
                self._got = None

    def _add(self, indices: Tensor, values: Tensor) -> None:
        target = self.outputs[0]
        with torch.no_grad():
            total = torch.sparse_coo_tensor(
                indices.t(), values, target.shape, device=target.device, check_invariants=False
            )
            target.copy_(total.coalesce())


def _counts(group: GroupHandle, tensor: Tensor, mine: int, timeout_s: float | None) -> list[int]:
    """Rows that each rank holds. The descriptor carries what must be equal on all of them."""
    facts = [mine, tensor.sparse_dim(), tensor.dense_dim(), *tensor.shape]
    given = np.array(facts, np.int64).view(np.uint8)
    got = np.empty(len(given) * group.size, np.uint8)
    descriptor = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int64", (len(facts),))
    group.post(descriptor, given, [got], timeout_s=timeout_s).wait()
    rows = got.view(np.int64).reshape(group.size, -1)
    for rank, row in enumerate(rows):
        if row[1:].tolist() != facts[1:]:
            raise BadTensor(
                f"{_WHAT}: rank {rank} gives shape {row[3:].tolist()} (sparse dimensions {row[1]}), this "
                f"rank {facts[3:]} (sparse dimensions {facts[1]})"
            )
    return [int(n) for n in rows[:, 0]]


def _post(
    group: GroupHandle,
    tensor: Tensor,
    name: str,
    counts: list[int],
    row: torch.Size | tuple[int, ...],
    timeout_s: float | None,
) -> tuple[FrogWork, Tensor]:
    """All_gather of rows: ``counts[r]`` of shape ``row`` from rank r."""
    width = int(np.prod(row, dtype=np.int64)) if row else 1
    splits = tuple(n * width for n in counts)
    out = torch.empty((sum(counts), *row), dtype=tensor.dtype)
    descriptor = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, name, (sum(splits),), splits=splits)
    sinks: list[Bytes] = [as_bytes(out)]
    op = group.post(descriptor, read(tensor), sinks, timeout_s=timeout_s)
    return FrogWork(op, [out], "all_reduce"), out
