"""Receipts and fingerprints as a training script asks for them: groups and tensors of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

from frogzmq.backend.errors import surface
from frogzmq.backend.process_group import FrogProcessGroup
from frogzmq.backend.tensors import dtype_name, read
from frogzmq.client import GroupHandle, audit
from frogzmq.content.ledger import Difference
from frogzmq.content.manifest import tensor_root
from frogzmq.errors import ConfigError, FrogError, IntegrityError
from frogzmq.types import Digest

_TENSOR = blake3(derive_key_context="frogzmq 2026 v1 tensor")


def receipts(group: Any = None) -> list[dict[str, Any]]:
    """The receipts that this rank's machine keeps of ``group`` (default: the world), oldest first.

    One dict an operation: ``group``, ``seq``, ``kind``, ``what``, ``state`` (``open``, ``kept``, ``agreed``,
    ``differs``), digests in hex: ``descriptor``, ``parts`` (with the ranks and machine of each; a root that
    this machine does not know is None), ``result``, ``receipt`` (one digest over all of these), ``got`` by
    local rank, and ``mine``: what this rank got. ``ConfigError`` where the group keeps none.
    """
    try:
        return audit.receipts(_handle(group))
    except FrogError as error:
        raise surface(error) from None


def compare_receipts(group: Any = None, *, check: bool = True) -> Difference | None:
    """Collective: find the first operation at which two ranks differ, and name who is odd.

    Returns None where all agree. With ``check`` a difference raises ``IntegrityError`` on every rank, else it
    is returned on every rank.
    """
    try:
        found = audit.compare_receipts(_handle(group))
        if found is not None and check:
            raise IntegrityError(f"receipts differ: {found}")
    except FrogError as error:
        raise surface(error) from None
    return found


def fingerprint(what: Any) -> dict[str, str]:
    """BLAKE3 (hex) of every tensor by name: dtype, shape and bytes, wherever and however it is stored.

    ``what``: a module (parameters and buffers), a mapping of names to tensors, tensors, or one tensor.
    """
    return {name: digest.hex() for name, digest in _prints(what).items()}


def compare_fingerprints(what: Any, group: Any = None, *, check: bool = True) -> str | None:
    """Collective: whether all ranks hold the same tensors; None if so.

    Else a text that names the odd ranks and the first tensor that differs: raised as ``IntegrityError`` on
    every rank, or returned without ``check``.
    """
    try:
        handle = _handle(group)
        found = audit.compare_fingerprints(handle, _prints(what))
        if found is None:
            return None
        ranks, name = found
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        tie = " (no majority tells who is right)" if len(ranks) == handle.size else ""
        text = f"{who} of group {handle.name!r} hold other bytes than the rest{tie}: first in {name!r}"
        if check:
            raise IntegrityError(text)
        return text
    except FrogError as error:
        raise surface(error) from None


def _handle(group: Any) -> GroupHandle:
    found = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(found, FrogProcessGroup):
        found = found._get_backend(torch.device("cpu"))
    if not isinstance(found, FrogProcessGroup):
        raise ConfigError(f"receipts need a group of backend 'frogzmq', not of {type(found).__name__}")
    return found._group


def _prints(what: Any) -> dict[str, Digest]:
    return {name: _tensor_digest(name, tensor) for name, tensor in _named(what)}


def _named(what: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(what, torch.nn.Module):
        return [*what.named_parameters(), *what.named_buffers()]
    if isinstance(what, torch.Tensor):
        return [("0", what)]
    if isinstance(what, Mapping):
        return [(str(name), value) for name, value in what.items() if isinstance(value, torch.Tensor)]
    return [(str(index), tensor) for index, tensor in enumerate(what)]


def _tensor_digest(name: str, tensor: torch.Tensor) -> Digest:
    data = tensor.detach()
    hasher = _TENSOR.copy()
    hasher.update(f"{dtype_name(data, f'fingerprint of {name}')} {tuple(data.shape)}\n".encode())
    hasher.update(tensor_root(read(data)))
    return Digest(hasher.digest())
