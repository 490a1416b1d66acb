"""gather and the other spellings of all_gather: uneven, coalesced, into one tensor.

A mixin beside ``Collectives``, whose helpers it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from frogzmq.backend.collectives import Collectives, _collective, _single, _timeout_of
from frogzmq.backend.errors import BadTensor
from frogzmq.backend.tensors import dtype_name, read, write_into
from frogzmq.backend.work import FrogWork
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp

Tensor = torch.Tensor


class Gathering(Collectives):
    """Every rank's tensor, on one rank or on all."""

    @_collective("gather")
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Give every rank's tensor to the root: ``[[out_0, .., out_n-1]]`` there, ``[]`` elsewhere."""
        what = "gather"
        tensor = _single(inputs, what)
        root = self._root_of(opts, what)
        outs = self._outputs_at(root, outputs, what)
        if outs:
            self._check_outputs(outs, tensor, what)
        descriptor = self._describe(OpKind.GATHER, ReduceOp.NONE, tensor, root)
        return self._exchange(descriptor, what, tensor, outs, _timeout_of(opts, timeout))

    @_collective("gather_single")
    def gather_single(
        self, output: Tensor | None, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Gather into one contiguous tensor at the root."""
        what = "gather_single"
        root = self._root_of(opts, what)
        outs: list[Tensor] = []
        if root == self._group.rank:
            if output is None:
                raise BadTensor(f"{what}: the root needs an output tensor")
            self._check_whole(output, tensor, what)
            outs = [output]
        descriptor = self._describe(OpKind.GATHER, ReduceOp.NONE, tensor, root)
        return self._exchange(descriptor, what, tensor, outs, _timeout_of(opts, timeout))

    @_collective("all_gather_coalesced")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> FrogWork:
        """All_gather of several tensors as one operation: ``outputs[rank][i]`` is its ``inputs[i]``."""
        what = "all_gather_coalesced"
        if len(outputs) != self._group.size:
            raise BadTensor(f"{what}: {len(outputs)} output lists for {self._group.size} ranks")
        for rank, row in enumerate(outputs):
            if [(t.dtype, t.shape) for t in row] != [(t.dtype, t.shape) for t in inputs]:
                raise BadTensor(
                    f"{what}: output list {rank} holds {_shapes(row)}, the inputs are {_shapes(inputs)}"
                )
        return self._gather_bytes(what, inputs, [t for row in outputs for t in row], opts)

    @_collective("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> FrogWork:
        """All_gather of several tensors as one operation, each into one contiguous tensor."""
        what = "all_gather_into_tensor_coalesced"
        if len(outputs) != len(inputs):
            raise BadTensor(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(output, tensor, what)
        size = self._group.size
        # A contribution holds all inputs, so the outputs are filled row by row.
        rows = [output.detach().view(-1).view(size, -1) for output in outputs]
        return self._gather_bytes(what, inputs, [row[r] for r in range(size) for row in rows], opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # -------------------------------------------------------------------- helpers
    def _gather_bytes(
        self,
        what: str,
        inputs: Sequence[Tensor],
        outs: Sequence[Tensor],
        opts: Any,
        outputs: Sequence[Tensor] = (),
    ) -> FrogWork:
        """All_gather of tensors of any dtypes, as bytes."""
        if not inputs:
            raise BadTensor(f"{what}: requires non-empty tensor list")
        for tensor in inputs:
            dtype_name(tensor, what)
        src = np.concatenate([read(tensor) for tensor in inputs])
        sinks, finish = write_into(outs, what)
        descriptor = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "uint8", (len(src),))
        op = self._group.post(descriptor, src, sinks, timeout_s=_timeout_of(opts, None), finish=finish)
        return self._tracked(FrogWork(op, list(outputs or outs), what))

    def _outputs_at(self, root: int, outputs: Any, what: str) -> list[Tensor]:
        if root != self._group.rank:
            if outputs and (isinstance(outputs[0], torch.Tensor) or outputs[0]):
                raise BadTensor(f"{what}: requires empty output on non-root rank {self._group.rank}")
            return []
        if len(outputs) != 1:
            raise BadTensor(f"{what}: requires a single-element output list containing a list with tensors")
        return list(outputs[0])


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
