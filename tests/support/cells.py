"""Ops for ranks of the pool to run, their inputs, and what ``support.reference`` says about them.

Inputs are a pure function of (seed, rank, dtype, count), so ranks and test compute them alike. Results come
back as digests: equal digests, equal bits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from frogzmq.descriptor import Descriptor
from frogzmq.dtypes import DTYPES
from frogzmq.fold.support import refusal
from frogzmq.types import OpKind, Order, ReduceOp

MODES = ("faithful", "shard", "auto")
SPECIALS = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, -1e-42, 65504.0, 3.3e38)
"""Subnormals, and the largest of float16 and (nearly) float32, among them."""


class Call(NamedTuple):
    """One collective of every rank of a job."""

    kind: OpKind
    reduce: ReduceOp
    dtype: str
    count: int
    root: int = -1

    def descriptor(self) -> Descriptor:
        """What the machines agree on."""
        return Descriptor(self.kind, self.reduce, self.dtype, (self.count,), self.root)


def cells(kind: OpKind = OpKind.ALL_REDUCE) -> Iterator[tuple[str, ReduceOp]]:
    """Every dtype and reduce op that go together, or every dtype with NONE where nothing is reduced."""
    for name, dtype in DTYPES.items():
        for reduce in ReduceOp:
            if reduce == ReduceOp.NONE and kind in (OpKind.ALL_REDUCE, OpKind.REDUCE):
                continue
            if refusal(kind, reduce, dtype) is None:
                yield name, reduce


def all_calls(count: int, size: int) -> list[Call]:
    """All_reduce in every cell; the other kinds for every dtype, roots and ops in turn."""
    # Inside the fabric PREMUL_SUM is a SUM, and the float8 formats differ in a table only.
    calls = [
        Call(OpKind.ALL_REDUCE, reduce, dtype, count)
        for dtype, reduce in cells()
        if (reduce != ReduceOp.PREMUL_SUM or dtype == "float32")
        and (DTYPES[dtype].kind != "quarter" or dtype == "float8_e4m3fn")
    ]
    alike = [name for name, row in DTYPES.items() if row.kind == "opaque" and row.itemsize == 1]
    for index, dtype in enumerate(name for name in DTYPES if name not in alike[1:]):
        calls.append(Call(OpKind.BROADCAST, ReduceOp.NONE, dtype, count, index % size))
        calls.append(Call(OpKind.ALL_GATHER, ReduceOp.NONE, dtype, count))
    for index, (dtype, reduce) in enumerate(cells(OpKind.REDUCE)):
        if index % 3 == 0:
            calls.append(Call(OpKind.REDUCE, reduce, dtype, count, index % size))
    return calls


@functools.lru_cache(maxsize=6)
def values(dtype: str, count: int, rank: int, seed: int) -> np.ndarray:
    """The bytes that ``rank`` gives: all integers, and floats of every size with the special ones.

    Read-only. The last few are kept, because the calls of a dtype follow one another.
    """
    made = _values(dtype, count, rank, seed)
    made.flags.writeable = False
    return made


def _values(dtype: str, count: int, rank: int, seed: int) -> np.ndarray:
    row = DTYPES[dtype]
    rng = np.random.default_rng([seed, rank, count])
    if row.kind == "bool":
        return rng.integers(0, 2, count, np.uint8)
    if row.kind in ("int", "opaque", "quarter"):
        return rng.integers(0, 256, count * row.itemsize, np.uint8)
    parts = count * (2 if row.kind == "complex" else 1)
    numbers = rng.standard_normal(parts, np.float32)
    if count < 10_000:
        numbers *= np.exp2(rng.integers(-20, 20, parts).astype(np.float32))
    special = rng.integers(0, parts, parts // 10) if parts else np.zeros(0, np.int64)
    numbers[special] = rng.choice(np.array(SPECIALS, np.float32), len(special))
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        kind = {"float16": np.float16, "complex32": np.float16, "float64": np.float64}
        kind |= {"complex128": np.float64}
        return numbers.astype(kind.get(dtype, np.float32)).view(np.uint8)


def digest(data: Any) -> str:
    """Stands for the bits."""
    return blake3(memoryview(data)).hexdigest(12)


# --------------------------------------------------------------------------- in a rank
def tensor_of(raw: np.ndarray, dtype: str) -> Any:
    """A tensor of its own memory with these bytes."""
    import torch

    tensor = torch.empty(len(raw) // DTYPES[dtype].itemsize, dtype=getattr(torch, dtype))
    tensor.view(torch.uint8).numpy()[:] = raw
    return tensor


def bits_of(tensor: Any) -> np.ndarray:
    """The tensor's bytes."""
    import torch

    out: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return out


def call(spec: Call, tensor: Any, group: Any) -> tuple[Any, Any]:
    """Start ``spec`` through torch's function; its work handle and the tensor of its result."""
    import torch
    import torch.distributed as dist

    if spec.kind == OpKind.BROADCAST:
        return dist.broadcast(tensor, spec.root, group, async_op=True), tensor
    if spec.kind == OpKind.ALL_GATHER:
        out = torch.empty(dist.get_world_size(group) * spec.count, dtype=tensor.dtype)
        return dist.all_gather_into_tensor(out, tensor, group, async_op=True), out
    op = getattr(dist.ReduceOp, spec.reduce.name)
    if spec.reduce == ReduceOp.PREMUL_SUM:
        op = dist._make_nccl_premul_sum(1.0)  # the oracle does not multiply
    if tensor.is_complex() and spec.reduce == ReduceOp.PRODUCT:  # torch's own function refuses this one
        if spec.kind == OpKind.REDUCE:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = op, spec.root
            return group.reduce([tensor], options), tensor
        return group.allreduce([tensor], _all_reduce_options(op)), tensor
    if spec.kind == OpKind.REDUCE:
        return dist.reduce(tensor, spec.root, op, group, async_op=True), tensor
    return dist.all_reduce(tensor, op, group, async_op=True), tensor


def _all_reduce_options(op: Any) -> Any:
    import torch.distributed as dist

    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def run_calls(
    rank: int,
    size: int,
    calls: Sequence[tuple[Any, ...]],
    seed: int,
    order: str,
    modes: Sequence[str] = MODES,
    delays: Sequence[float] = (),
    depth: int = 16,
) -> list[list[str]]:
    """Every call in a group of every mode, ``depth`` of them under way; a digest for each mode and call.

    ``depth`` 0: one op at a time, also of the modes. ``delays``: seconds that this rank sleeps before its
    calls, over and over.
    """
    import torch.distributed as dist

    import frogzmq

    groups = [dist.new_group(pg_options=frogzmq.Options(mode=mode, order=order)) for mode in modes]
    done: list[list[str]] = [[] for _ in modes]
    running: list[list[tuple[Any, Any]]] = []

    def settle() -> None:
        for digests, (work, out) in zip(done, running.pop(0), strict=True):
            work.wait()
            digests.append(digest(bits_of(out)))

    for index, fields in enumerate(calls):
        spec = Call(*fields)
        if delays:
            time.sleep(delays[(index * 7 + rank) % len(delays)])
        raw = values(spec.dtype, spec.count, rank, seed)
        running.append([])
        for group in groups:
            running[-1].append(call(spec, tensor_of(raw, spec.dtype), group))
            if depth == 0:
                running[-1][-1][0].wait()
        if len(running) >= depth:
            settle()
    while running:
        settle()
    return done


# --------------------------------------------------------------------------- in the test
def expected(spec: Call, placement: Sequence[int], seed: int, order: str) -> list[str]:
    """The digest that each rank must report."""
    return list(_expected(spec, tuple(placement), seed, order))


@functools.lru_cache(maxsize=4096)
def _expected(spec: Call, placement: tuple[int, ...], seed: int, order: str) -> tuple[str, ...]:
    from support.reference import reference

    inputs = [values(spec.dtype, spec.count, rank, seed) for rank in range(len(placement))]
    hosts = [[r for r, m in enumerate(placement) if m == machine] for machine in sorted(set(placement))]
    result = digest(reference(spec.descriptor(), inputs, hosts, Order(order)))
    if spec.kind != OpKind.REDUCE:
        return (result,) * len(placement)
    return tuple(result if rank == spec.root else digest(raw) for rank, raw in enumerate(inputs))
