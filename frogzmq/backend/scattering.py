"""scatter, reduce_scatter and all_to_all, in torch's spellings.

A mixin beside ``Collectives``, whose helpers it uses.

all_to_all with sizes of the caller's choosing goes as messages: a rank knows what it gives and what it
expects, and nobody knows all. Blocks of equal size are one planned operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from frogzmq.backend.collectives import Collectives, _collective, _reduce_of, _single, _timeout_of
from frogzmq.backend.errors import BadTensor
from frogzmq.backend.joint import JointWork
from frogzmq.backend.p2p import MailWork
from frogzmq.backend.premul import premultiplied
from frogzmq.backend.tensors import Bytes, apart, dtype_name, is_plain, read, touches, write_into
from frogzmq.backend.work import FrogWork
from frogzmq.descriptor import Descriptor
from frogzmq.types import OpKind, ReduceOp

Tensor = torch.Tensor
BLOCK_TAGS = 1 << 31
"""Tags from here on are ours: a caller's end below."""
COUNTED = (1 << 30) - 1


class Scattering(Collectives):
    """Slices of what ranks give, to each its own."""

    _exchanges = 0
    """All_to_alls of unequal blocks so far: their messages carry the number, so that none mix."""

    @_collective("scatter")
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Give tensor r of the root's list to rank r: ``[[in_0, .., in_n-1]]`` there, ``[]`` elsewhere."""
        what = "scatter"
        output = _single(outputs, what)
        root = self._root_of(opts, what)
        src = None
        if root == self._group.rank:
            if len(inputs) != 1:
                raise BadTensor(
                    f"{what}: requires a single-element input list containing a list with tensors"
                )
            given = list(inputs[0])
            self._check_outputs(given, output, what)
            src = _joined(given, output)
        elif inputs and (isinstance(inputs[0], torch.Tensor) or inputs[0]):
            raise BadTensor(f"{what}: requires empty input on non-root rank {self._group.rank}")
        descriptor = self._describe(OpKind.SCATTER, ReduceOp.NONE, output, root)
        sinks, finish = write_into([output], what)
        op = self._group.post(descriptor, src, sinks, timeout_s=_timeout_of(opts, timeout), finish=finish)
        return self._tracked(FrogWork(op, [output], what, root))

    @_collective("reduce_scatter")
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Fold tensor r of the ranks' lists for rank r: ``[output]``, ``[[in_0, .., in_n-1]]``.

        The tensors may have different sizes, the same list of sizes on every rank.
        """
        what = "reduce_scatter"
        output = _single(outputs, what)
        nested = bool(inputs) and not isinstance(inputs[0], torch.Tensor)
        given: list[Tensor] = list(inputs[0] if nested else inputs)
        if len(given) != self._group.size:
            raise BadTensor(f"{what}: {len(given)} input tensors for {self._group.size} ranks")
        mine = given[self._group.rank]
        if mine.numel() != output.numel() or any(t.dtype != output.dtype for t in given):
            raise BadTensor(
                f"{what}: the output is {output.dtype}{list(output.shape)}, the input for this rank "
                f"{mine.dtype}{list(mine.shape)} (input dtypes: {sorted({str(t.dtype) for t in given})})"
            )
        reduce = _reduce_of(opts, what)
        checked = self._describe(OpKind.REDUCE_SCATTER, reduce, output)
        counts = [tensor.numel() for tensor in given]
        # Always with splits: a list of tensors is folded one by one, which order ``gloo`` shows in the bits.
        shape, splits = (sum(counts),), tuple(counts)
        descriptor = Descriptor(checked.kind, checked.reduce, checked.dtype, shape, splits=splits)
        if reduce == ReduceOp.PREMUL_SUM:
            given = [premultiplied(tensor, opts, what) for tensor in given]
        return self._deal(descriptor, what, _joined(given, output), output, _timeout_of(opts, timeout))

    @_collective("reduce_scatter_tensor")
    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Fold the ranks' tensors; rank r gets slice r of the first dimension of the outcome."""
        what = "reduce_scatter_tensor"
        want = output.numel() * self._group.size
        if tensor.numel() != want or tensor.dtype != output.dtype:
            raise BadTensor(
                f"{what}: the input must hold {want} elements of {output.dtype}: output "
                f"{tuple(output.shape)}, input {tuple(tensor.shape)} of {tensor.dtype}, "
                f"{self._group.size} ranks"
            )
        reduce = _reduce_of(opts, what)
        checked = self._describe(OpKind.REDUCE_SCATTER, reduce, tensor)
        descriptor = checked if tensor.dim() == 1 else self._flat(checked)
        given = tensor if reduce != ReduceOp.PREMUL_SUM else premultiplied(tensor, opts, what)
        return self._deal(descriptor, what, apart(given, output), output, _timeout_of(opts, timeout))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    @_collective("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> JointWork:
        """Several reduce_scatters, seen as one operation."""
        what = "reduce_scatter_tensor_coalesced"
        if not inputs or len(outputs) != len(inputs):
            raise BadTensor(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return JointWork(works, list(outputs), what)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_collective("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> JointWork:
        """Tensor d of rank s's inputs goes to tensor s of rank d's outputs. Sizes may differ."""
        what, size = "all_to_all", self._group.size
        if len(outputs) != size or len(inputs) != size:
            raise BadTensor(f"{what}: {len(inputs)} inputs and {len(outputs)} outputs for {size} ranks")
        return self._blocks(what, list(outputs), list(inputs), list(outputs), opts)

    @_collective("all_to_all_single")
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> FrogWork | JointWork:
        """Slice d of rank s's tensor goes to slice s of rank d's output, along the first dimension.

        Without splits all slices are equal; splits say how many rows each rank gives and gets.
        """
        what, size = "all_to_all_single", self._group.size
        if output.dtype != tensor.dtype:
            raise BadTensor(f"{what}: the output is {output.dtype}, the input {tensor.dtype}")
        if not output.is_contiguous():
            raise BadTensor(f"{what}: the output must be contiguous, its strides are {output.stride()}")
        if output_splits or input_splits:
            outs = _slices(output, output_splits, size, f"{what}: output")
            ins = _slices(tensor, input_splits, size, f"{what}: input")
            return self._blocks(what, outs, ins, [output], opts)
        if tensor.numel() != output.numel() or (tensor.dim() and tensor.shape[0] % size):
            raise BadTensor(
                f"{what}: input {tuple(tensor.shape)} and output {tuple(output.shape)} cannot be dealt out "
                f"evenly to {size} ranks; give input_split_sizes and output_split_sizes"
            )
        checked = self._describe(OpKind.ALL_TO_ALL, ReduceOp.NONE, tensor)
        descriptor = checked if tensor.dim() == 1 else self._flat(checked)
        return self._deal(descriptor, what, apart(tensor, output), output, _timeout_of(opts, timeout))

    alltoall_base = all_to_all_single

    # -------------------------------------------------------------------- helpers
    def _flat(self, descriptor: Descriptor) -> Descriptor:
        """The same bytes as a vector: ranks may see them in different shapes."""
        return Descriptor(descriptor.kind, descriptor.reduce, descriptor.dtype, (descriptor.numel,))

    def _deal(
        self, descriptor: Descriptor, what: str, src: Bytes, output: Tensor, timeout_s: float | None
    ) -> FrogWork:
        sinks, finish = write_into([output], what)
        op = self._group.post(descriptor, src, sinks, timeout_s=timeout_s, finish=finish)
        return self._tracked(FrogWork(op, [output], what))

    def _blocks(
        self, what: str, outs: list[Tensor], ins: list[Tensor], outputs: list[Tensor], opts: Any
    ) -> JointWork:
        """Blocks of any sizes as messages; a rank that expects another size than it is sent hears of it."""
        rank, mail, timeout_s = self._group.rank, self._group.mail, _timeout_of(opts, None)
        for index, tensor in enumerate([*ins, *outs]):
            if tensor.dtype != ins[0].dtype:
                raise BadTensor(f"{what}: tensor {index} is {tensor.dtype}, another {ins[0].dtype}")
        if ins[rank].numel() != outs[rank].numel():
            raise BadTensor(
                f"{what}: this rank gives itself {ins[rank].numel()} elements and expects "
                f"{outs[rank].numel()}"
            )
        name = dtype_name(ins[0], what)
        tag = BLOCK_TAGS + (self._exchanges & COUNTED)
        self._exchanges += 1
        works: list[MailWork] = []
        others = [r % self._group.size for r in range(rank + 1, rank + self._group.size)]
        landings = {r: write_into([outs[r]], what) for r in others}
        written = {out.untyped_storage().data_ptr() for out in outs}
        if any(tensor.untyped_storage().data_ptr() in written for tensor in ins):
            ins = [
                tensor.detach().clone() for tensor in ins
            ]  # what arrives must not reach what has yet to go
        blocks = {r: read(ins[r]) for r in others}
        for r in others:
            sinks, finish = landings[r]
            letter = mail.receive(r, tag, name, sinks, timeout_s, finish)
            works.append(MailWork(letter, [outs[r]], what))
        works += [MailWork(mail.send(r, tag, name, blocks[r], timeout_s), [ins[r]], what) for r in others]
        with torch.no_grad():
            outs[rank].copy_(ins[rank].view_as(outs[rank]))
        return self._tracked(JointWork(works, outputs, what))


def _joined(tensors: Sequence[Tensor], output: Tensor) -> Bytes:
    """The tensors' bytes one after the other: their own memory where it lies so, as views of one tensor do
    (``chunk``, ``split``), and ``output`` is elsewhere; else a copy made now."""
    if _adjacent(tensors) and not touches(
        output, tensors[0].data_ptr(), tensors[-1].data_ptr() + tensors[-1].nbytes
    ):
        return read(tensors[0].detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,)))
    pieces = [read(tensor) for tensor in tensors]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether plain tensors of one dtype lie end to start in one storage, in this order."""
    first = tensors[0]
    if not first.numel() or not all(is_plain(t) and t.dtype == first.dtype for t in tensors):
        return False
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != at:
            return False
        at += tensor.numel()
    return True


def _slices(tensor: Tensor, splits: Sequence[int] | None, size: int, what: str) -> list[Tensor]:
    """Views of consecutive rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = list(splits) if splits else [rows // size] * size
    if len(counts) != size or any(n < 0 for n in counts) or sum(counts) != rows:
        raise BadTensor(f"{what}: splits {counts} do not deal out {rows} rows to {size} ranks")
    return list(torch.split(tensor.detach(), counts))
