"""The process group that torch sees: names, sizes, settings and the end; collectives and messages are mixins.

``dist.ProcessGroup`` is the only base that can be subclassed from Python in torch 2.13, and works in 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from frogzmq.backend.gathering import Gathering
from frogzmq.backend.monitor import monitored_barrier
from frogzmq.backend.p2p import PointToPoint
from frogzmq.backend.register import NAME
from frogzmq.backend.scattering import Scattering
from frogzmq.client import GroupHandle
from frogzmq.client.lifecycle import reason_of
from frogzmq.errors import FrogError

_Base: Any = dist.ProcessGroup  # the stubs lag behind the overloads that Python may override


class FrogProcessGroup(PointToPoint, Gathering, Scattering, _Base):  # type: ignore[misc]
    """One group. ``release`` is called once, when the group is left."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    options: Any = None
    """Where torch leaves notes on a group that it takes for one of Gloo's."""

    def __init__(self, group: GroupHandle, store: Store, name: str, release: Callable[[], None]) -> None:
        _Base.__init__(self, group.rank, group.size)
        self._group = group
        # torch keeps no Python reference to a store written in Python; without ours it would be collected.
        self._store = store
        self._name = name
        self._desc = "undefined"
        self._release: Callable[[], None] | None = release
        self._descriptors = {}
        self._monitored = 0

    # Spelled as C++ and Python callers ask for them.
    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def name(self) -> str:
        """The backend's name."""
        return NAME

    def getRank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    def getSize(self) -> int:
        """Ranks in the group."""
        return self._group.size

    def size(self) -> int:
        """Ranks in the group."""
        return self._group.size

    def getGroupName(self) -> str:
        """The name that torch gave."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives."""
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        """The description that torch gave."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Take the description that torch gives."""
        self._desc = desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        """The name that torch gave."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that torch gave."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")] if torch.cuda.is_available() else [_CPU]

    def _get_backend(self, device: torch.device) -> FrogProcessGroup:
        return self

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Time that each further operation may take."""
        self._group.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Operations are always numbered from 1."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.seq

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False, **_: object
    ) -> None:
        """A barrier that names the ranks that did not come."""
        self._monitored += 1
        monitored_barrier(self._group, self._monitored, timeout, wait_all_ranks)

    # ------------------------------------------------------------------- the end
    def shutdown(self) -> None:
        """Leave the group: what was given is delivered, what is still open here fails. Idempotent.

        Called while an exception is on its way (``finally``), the other ranks are told which.
        """
        error = sys.exc_info()[1]
        why = "destroyed" if error is None else f"destroyed after {reason_of(error)}"
        self._end(lambda: self._group.close(why))

    def abort(self) -> None:
        """Leave at once; other ranks' open operations fail."""
        self._end(lambda: self._group.leave(False, "aborted"))

    def _end(self, leave: Callable[[], None]) -> None:
        release, self._release = self._release, None
        if release is None or self._group.client.forked:
            return
        try:
            leave()
        except FrogError:
            pass  # the peer is gone, and the group with it
        finally:
            release()


_CPU = torch.device("cpu")
