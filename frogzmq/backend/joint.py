"""Several operations that torch sees as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from frogzmq.backend.errors import FrogError


class JointWork(Work):
    """Done when all of ``works`` are; fails as the first of them that failed."""

    def __init__(self, works: Sequence[Any], outputs: Sequence[torch.Tensor], name: str) -> None:
        super().__init__()
        self._works = works
        self.outputs = outputs
        self._name = name
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when all are done; each may take ``timeout`` (None: its own)."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are done, well or not."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Whether all are done and none failed."""
        return all([work.is_success() for work in self._works])

    def exception(self) -> Any:
        """The first error there is, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors; raises before completion, and the error after a failure."""
        if not self.is_completed():
            raise FrogError(f"{self._name}: result() before the operation is complete; call wait() first")
        error = self.exception()
        if error is not None:
            raise error
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of output tensors; the same one at every call."""
        if self._future is None:
            parts = [work.get_future() for work in self._works]
            finish: Callable[[Any], list[torch.Tensor]] = self._finish
            self._future = torch.futures.collect_all(parts).then(finish)
        return self._future

    def _finish(self, done: torch.futures.Future[Any]) -> list[torch.Tensor]:
        for part in done.value():
            part.value()  # raises what it failed with
        return list(self.outputs)

    def source_rank(self) -> int:
        """Never known: there are several operations."""
        raise FrogError(f"{self._name}: source_rank() has no meaning for this operation")

    def _source_rank(self) -> int:
        return self.source_rank()
