"""Tell torch that the backend ``frogzmq`` exists. Light: the rest is imported when a group is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "frogzmq"


def register() -> None:
    """Register the backend for cpu and cuda; nothing where it is, or torch has no distributed."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, pg_options: object) -> ProcessGroup:
    """torch's call for a new group (``_DistributedBackendOptions``, whatever the user gave)."""
    from frogzmq.backend.create import create_group

    return create_group(options, pg_options)
