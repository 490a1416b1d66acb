"""Standing behind the name "gloo", for code that has that name hard-wired.

Opt-in (``frogzmq.install(as_gloo=True)``, or FROGZMQ_AS_GLOO=1 in the environment) and reversible. From then
on a group made for "gloo" in this process is ours. All ranks of a job must do the same: a rank on the real
Gloo and one on the fabric never meet, and time out.

torch 2.13 makes Gloo groups by calling the class ``ProcessGroupGloo``; 2.14 looks its creator up by name.
Both are replaced where they exist.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

GLOO = "gloo"
_kept: dict[str, Any] = {}
"""What was replaced, while something is."""


def stand_in() -> None:
    """From now on groups made for "gloo" in this process are ours. Harmless when called again."""
    if _kept:
        return
    _kept["class"] = c10d.__dict__.get("ProcessGroupGloo")
    _kept["available"] = c10d.__dict__.get("_GLOO_AVAILABLE")
    plugins = dist.Backend._plugins
    _kept["plugin"] = plugins.get("GLOO")
    if _kept["plugin"] is not None:
        plugins["GLOO"] = dist.Backend._BackendPlugin(_create, True)
    c10d.__dict__.update(ProcessGroupGloo=_GlooStandIn, _GLOO_AVAILABLE=True)


def step_aside() -> None:
    """Give the name back to torch's own Gloo; groups that exist stay what they are."""
    if not _kept:
        return
    for name, value in (("ProcessGroupGloo", _kept["class"]), ("_GLOO_AVAILABLE", _kept["available"])):
        if value is None:
            delattr(c10d, name)
        else:
            c10d.__dict__[name] = value
    if _kept["plugin"] is not None:
        dist.Backend._plugins["GLOO"] = _kept["plugin"]
    _kept.clear()


def standing_in() -> bool:
    """Whether "gloo" means frogzmq in this process."""
    return bool(_kept)


def _create(options: Any, pg_options: object) -> Any:
    from frogzmq.backend.create import create_group

    # torch hands Gloo's own options object or None; ours come from the environment then.
    group = create_group(options, None, GLOO)
    group.options = SimpleNamespace(global_ranks_in_group=options.global_ranks_in_group)
    return group


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        from frogzmq.backend.process_group import FrogProcessGroup

        real = _kept.get("class")
        return isinstance(instance, FrogProcessGroup) or (real is not None and isinstance(instance, real))

    def __call__(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = c10d.default_pg_timeout,
        **_: object,
    ) -> Any:
        from frogzmq.backend.create import seen_by_torch

        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id=_name_of(store),
            # Groups of other members may bear the same name, so they matter.
            global_ranks_in_group=list(seen_by_torch("global_ranks_in_group") or ()),
        )
        return _create(options, None)


class _GlooStandIn(metaclass=_Meta):
    """Called like ``ProcessGroupGloo``, it makes one of our groups."""


def _name_of(store: Store) -> str:
    """The group's name: torch puts it into the store's prefix, with the device before it."""
    prefix = getattr(store, "prefix", "")
    if callable(prefix):
        prefix = prefix()
    return str(prefix).strip("/").rpartition("/")[2] or "default"
