"""The collectives of a group, in torch's spellings: checks, then one ``post``, then a ``Work``.

A mixin, so that the base class can change with torch. It needs ``_group`` and ``_descriptors``. Whatever
is wrong with a call is raised before anything is sent; the other ranks then wait for this one's next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import (
    _allow_inflight_collective_as_graph_input,
    _register_work,
)
from torch.autograd.profiler import record_function

from frogzmq.backend.errors import BadTensor, FrogError, UnsupportedError, UnsupportedType, surface
from frogzmq.backend.joint import JointWork
from frogzmq.backend.premul import premultiplied
from frogzmq.backend.tensors import Bytes, as_bytes, dtype_name, is_plain, read, touches, write_into
from frogzmq.backend.work import FrogWork
from frogzmq.client import GroupHandle
from frogzmq.descriptor import Descriptor
from frogzmq.dtypes import DTYPES
from frogzmq.errors import FrogError as PlainError
from frogzmq.fold.support import refusal
from frogzmq.types import OpKind, ReduceOp

Tensor: TypeAlias = torch.Tensor
Key: TypeAlias = tuple[OpKind, ReduceOp, torch.dtype, tuple[int, ...], int]
Tracked: TypeAlias = FrogWork | JointWork
W = TypeVar("W", bound=Tracked)
P = ParamSpec("P")
R = TypeVar("R")

_REDUCE = {
    int(getattr(torch.distributed.ReduceOp, name)): ReduceOp[name]
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
_BARRIER = Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,))
_DESCRIPTORS_KEPT = 4096


def _collective(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name it in profiles, keep Dynamo out, and raise errors of the torch surface."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                # Called only while compiling: asking torch for this earlier would import Dynamo (2 s).
                outside: Callable[P, R] = torch._compile._disable_dynamo(plain)
                return outside(*args, **kwargs)
            return plain(*args, **kwargs)

        def plain(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                if not _profiler_enabled():
                    return function(*args, **kwargs)
                with record_function(f"frogzmq:{name}"):
                    return function(*args, **kwargs)
            except PlainError as error:
                if isinstance(error, FrogError):
                    raise
                raise surface(error) from None

        return call

    return wrap


class Collectives:
    """all_reduce, broadcast, all_gather, reduce and barrier."""

    _group: GroupHandle
    _descriptors: dict[Key, Descriptor]
    _batch: list[Any] | None = None
    """Works of a coalescing block, while one is open."""

    @_collective("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Tracked:
        """Fold the ranks' tensors; all get the result, in place. One tensor (or a list of one)."""
        tensor = _single(tensors, "all_reduce")
        reduce = _reduce_of(opts, "all_reduce")
        if tensor.is_sparse:
            from frogzmq.backend.sparse import all_reduce  # rarely wanted

            return self._tracked(all_reduce(self._group, tensor, reduce, _timeout_of(opts, timeout)))
        descriptor = self._describe(OpKind.ALL_REDUCE, reduce, tensor)
        given = tensor if reduce != ReduceOp.PREMUL_SUM else premultiplied(tensor, opts, "all_reduce")
        return self._exchange(descriptor, "all_reduce", given, [tensor], _timeout_of(opts, timeout))

    @_collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> FrogWork:
        """All_reduce of several tensors of one dtype as one operation."""
        what = "all_reduce_coalesced"
        if not tensors:
            raise BadTensor(f"{what}: requires non-empty tensor list")
        if any(t.dtype != tensors[0].dtype for t in tensors):
            raise BadTensor(f"{what}: all tensors must have one dtype, got {[str(t.dtype) for t in tensors]}")
        key_tensor = torch.empty(0, dtype=tensors[0].dtype).expand(0)
        checked = self._describe(OpKind.ALL_REDUCE, _reduce_of(opts, what), key_tensor)
        for tensor in tensors:
            dtype_name(tensor, what)
        total = sum(tensor.numel() for tensor in tensors)
        descriptor = Descriptor(checked.kind, checked.reduce, checked.dtype, (total,))
        given: Sequence[Tensor] = tensors
        if checked.reduce == ReduceOp.PREMUL_SUM:
            given = [premultiplied(tensor, opts, what) for tensor in tensors]
        sinks, finish = write_into(tensors, what)
        src = np.concatenate([read(tensor) for tensor in given])
        op = self._group.post(descriptor, src, sinks, timeout_s=_timeout_of(opts, None), finish=finish)
        return self._tracked(FrogWork(op, list(tensors), what))

    @_collective("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> FrogWork:
        """Give the root's tensor to all ranks, in place. ``opts``: ``BroadcastOptions`` or the root."""
        tensor = _single(tensors, "broadcast")
        root = self._root_of(opts, "broadcast")
        descriptor = self._describe(OpKind.BROADCAST, ReduceOp.NONE, tensor, root)
        timeout_s = _timeout_of(opts, timeout)
        if root == self._group.rank:
            op = self._group.post(descriptor, read(tensor), (), timeout_s=timeout_s)
        else:
            sinks, finish = write_into([tensor], "broadcast")
            op = self._group.post(descriptor, None, sinks, timeout_s=timeout_s, finish=finish)
        return self._tracked(FrogWork(op, [tensor], "broadcast", root))

    @_collective("reduce")
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> FrogWork:
        """Fold the ranks' tensors; the root gets the result in place, others' tensors stay as they are."""
        tensor = _single(tensors, "reduce")
        root = self._root_of(opts, "reduce")
        reduce = _reduce_of(opts if op is None else op, "reduce")
        descriptor = self._describe(OpKind.REDUCE, reduce, tensor, root)
        outputs = [tensor] if root == self._group.rank else []
        given = tensor
        if reduce == ReduceOp.PREMUL_SUM:
            given = premultiplied(tensor, opts if op is None else op, "reduce")
        return self._exchange(descriptor, "reduce", given, outputs, _timeout_of(opts, None))

    @_collective("all_gather")
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """Give every rank's tensor to all ranks: ``[[out_0, .., out_n-1]]``, ``[input]``."""
        what = "all_gather"
        tensor = _single(inputs, what)
        nested = bool(outputs) and not isinstance(outputs[0], torch.Tensor)
        if nested and len(outputs) != 1:
            raise BadTensor(f"{what}: requires a single-element output list containing a list with tensors")
        outs: list[Tensor] = list(outputs[0] if nested else outputs)
        counts = [out.numel() for out in outs]
        if len(outs) == self._group.size and len(set(counts)) > 1:
            descriptor = self._uneven(outs, tensor, counts, what)
        else:
            self._check_outputs(outs, tensor, what)
            descriptor = self._describe(OpKind.ALL_GATHER, ReduceOp.NONE, tensor)
        return self._exchange(descriptor, what, tensor, outs, _timeout_of(opts, timeout))

    def _uneven(self, outs: Sequence[Tensor], tensor: Tensor, counts: Sequence[int], what: str) -> Descriptor:
        """Ranks give different amounts, and every rank's outputs say how much each gives."""
        mine = outs[self._group.rank]
        if mine.shape != tensor.shape or any(out.dtype != tensor.dtype for out in outs):
            raise BadTensor(
                f"{what}: invalid output tensor list: for this rank it has {mine.dtype}{list(mine.shape)}, "
                f"the input is {tensor.dtype}{list(tensor.shape)} "
                f"(output dtypes: {sorted({str(o.dtype) for o in outs})})"
            )
        name = dtype_name(tensor, what)
        return Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, name, (sum(counts),), splits=tuple(counts))

    @_collective("all_gather_into_tensor")
    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> FrogWork:
        """All_gather into one contiguous tensor of ``size`` times the elements, whatever its shape."""
        what = "all_gather_into_tensor"
        self._check_whole(output, tensor, what)
        descriptor = self._describe(OpKind.ALL_GATHER, ReduceOp.NONE, tensor)
        return self._exchange(descriptor, what, tensor, [output], _timeout_of(opts, timeout))

    _allgather_base = all_gather_single
    all_gather_into_tensor = all_gather_single

    @_collective("barrier")
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> FrogWork:
        """Complete when all ranks have called it and all earlier operations of the group are done."""
        op = self._group.post(_BARRIER, None, (), timeout_s=_timeout_of(opts, timeout), fence=True)
        return FrogWork(op, [], "barrier")

    # -------------------------------------------------------------------- helpers
    def _exchange(
        self,
        descriptor: Descriptor,
        what: str,
        tensor: Tensor,
        outputs: Sequence[Tensor],
        timeout_s: float | None,
    ) -> FrogWork:
        """Post an op to which this rank gives ``tensor`` and from which it fills ``outputs``."""
        if len(outputs) == 1 and outputs[0] is tensor and is_plain(tensor):
            src = as_bytes(tensor)
            op = self._group.post(descriptor, src, (src,), timeout_s=timeout_s)
        else:
            sinks, finish = write_into(outputs, what)
            given = self._given(tensor, outputs)
            op = self._group.post(descriptor, given, sinks, timeout_s=timeout_s, finish=finish)
        return self._tracked(FrogWork(op, outputs or [tensor], what, descriptor.root))

    def _given(self, tensor: Tensor, outputs: Sequence[Tensor]) -> Bytes:
        """What this rank gives: the tensor's memory, or a copy where an output lies across it.

        Gathered into the place that it stands in already (FSDP does so), the same bytes are written there.
        """
        rank, start = self._group.rank, tensor.data_ptr()
        if not is_plain(tensor) or not any(touches(out, start, start + tensor.nbytes) for out in outputs):
            return read(tensor)
        one = len(outputs) == 1
        place = outputs[0].data_ptr() + rank * tensor.nbytes if one else outputs[rank].data_ptr()
        return read(tensor) if place == start else read(tensor).copy()

    def _tracked(self, work: W) -> W:
        """Let functional collectives find the work by its tensors, where torch asks for that."""
        if _allow_inflight_collective_as_graph_input():
            for tensor in work.outputs:
                _register_work(tensor, work)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """From now on until ``_end_coalescing``, operations are waited for together."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> JointWork:
        """One work for all operations since ``_start_coalescing``."""
        batch, self._batch = self._batch or [], None
        return JointWork(batch, [tensor for work in batch for tensor in work.outputs], "coalesced")

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _describe(self, kind: OpKind, reduce: ReduceOp, tensor: Tensor, root: int = -1) -> Descriptor:
        """The op's descriptor; raises where this kind of tensor, dtype and reduce op do not go together."""
        if tensor.is_nested:  # it has no shape
            dtype_name(tensor, kind.name.lower())
        key = (kind, reduce, tensor.dtype, tensor.shape, root)
        if tensor.is_cpu and tensor.layout is torch.strided:
            known = self._descriptors.get(key)
            if known is not None:
                return known
        what = kind.name.lower()
        name = dtype_name(tensor, what)
        refused = refusal(kind, reduce, DTYPES[name])
        if refused is not None:
            raise UnsupportedType(f"{what}: {refused}")
        descriptor = Descriptor(kind, reduce, name, tuple(tensor.shape), root)
        if len(self._descriptors) >= _DESCRIPTORS_KEPT:
            self._descriptors.clear()
        self._descriptors[key] = descriptor
        return descriptor

    def _root_of(self, opts: Any, what: str) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if not 0 <= root < self._group.size:
            raise BadTensor(
                f"{what}: invalid root rank {root}; the group has ranks 0 to {self._group.size - 1}"
            )
        if getattr(opts, "rootTensor", 0) != 0:
            raise BadTensor(f"{what}: invalid root tensor {opts.rootTensor}; there is one tensor a rank")
        return int(root)

    def _check_whole(self, output: Tensor, tensor: Tensor, what: str) -> None:
        """One output that holds every rank's ``tensor``."""
        shapes = f"output {tuple(output.shape)}, input {tuple(tensor.shape)}, {self._group.size} ranks"
        want = tensor.numel() * self._group.size
        if output.numel() != want:
            raise BadTensor(f"{what}: the output needs {want} elements and has {output.numel()}: {shapes}")
        if output.dtype != tensor.dtype:
            raise BadTensor(f"{what}: the output is {output.dtype}, the input {tensor.dtype}: {shapes}")
        if not output.is_contiguous():
            raise BadTensor(
                f"{what}: the output must be contiguous, its strides are {output.stride()}: {shapes}"
            )

    def _check_outputs(self, outputs: Sequence[Tensor], tensor: Tensor, what: str) -> None:
        if len(outputs) != self._group.size:
            raise BadTensor(f"{what}: {len(outputs)} output tensors for {self._group.size} ranks")
        for index, output in enumerate(outputs):
            if output.dtype != tensor.dtype or output.shape != tensor.shape:
                raise BadTensor(
                    f"{what}: invalid output tensor list at index {index}: it is "
                    f"{output.dtype}{list(output.shape)}, the input is {tensor.dtype}{list(tensor.shape)}"
                )


def _single(tensors: Any, what: str) -> Tensor:
    """The one tensor of a call that torch allows to be a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return tensors[0]
    if not tensors:
        raise BadTensor(f"{what}: requires non-empty tensor list")
    raise BadTensor(f"{what}: expected one tensor a rank, got {len(tensors)} (one device a rank)")


def _reduce_of(opts: Any, what: str) -> ReduceOp:
    """Our reduce op from an options object, a ``ReduceOp``, or nothing (SUM)."""
    if opts is None:
        return ReduceOp.SUM
    chosen = getattr(opts, "reduceOp", opts)
    number = int(getattr(chosen, "op", chosen))
    reduce = _REDUCE.get(number)
    if reduce is None:
        name = getattr(getattr(chosen, "op", chosen), "name", str(chosen))
        raise UnsupportedError(
            f"{what}: reduce op {name} is not supported; known: {', '.join(ReduceOp.__members__)}"
        )
    return reduce


def _timeout_of(opts: Any, timeout: timedelta | None) -> float | None:
    """Seconds that the call may take, or None for the group's; torch writes "unset" as -1 ms."""
    chosen = timeout if timeout is not None else getattr(opts, "timeout", None)
    if chosen is None:
        return None
    seconds: float = chosen.total_seconds()
    return seconds if seconds > 0 else None
