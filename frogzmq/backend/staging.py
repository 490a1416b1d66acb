"""Tensors on a GPU: through pinned host memory, in step with the streams of whoever calls.

A contribution has arrived on the host before the op is posted, and a result has arrived on the GPU before the
op is done: whoever waited for the op may use the tensor on any stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the GPU is there."""


class Stream(Protocol):
    """A queue of work on a GPU."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on start after ``event``."""

    def synchronize(self) -> None:
        """Block the calling thread until the queue is done."""


class Gpu(Protocol):
    """What staging needs of a GPU; tests put one together without."""

    def pinned(self, like: Tensor) -> Tensor:
        """A contiguous host tensor of that shape and dtype in page-locked memory."""

    def mark(self, device: torch.device) -> Event:
        """The end of all that the caller's current stream has been given so far."""

    def side(self, device: torch.device) -> Stream:
        """A stream apart from the caller's."""

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, work goes to that stream."""


class Cuda:
    """The real one."""

    def pinned(self, like: Tensor) -> Tensor:
        """See ``Gpu``; the memory comes from torch's cache of pinned blocks."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def mark(self, device: torch.device) -> Event:
        """See ``Gpu``."""
        event: Event = torch.cuda.current_stream(device).record_event()
        return event

    def side(self, device: torch.device) -> Stream:
        """See ``Gpu``; torch keeps a pool of them."""
        stream: Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """See ``Gpu``."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]


CUDA = Cuda()


def fetch(tensor: Tensor, gpu: Gpu = CUDA) -> Tensor:
    """A copy in pinned memory. It runs on the caller's current stream, so after what computes the tensor."""
    # Resolved there: copying would conjugate on the host, which does not wait for the transfer.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    staged = gpu.pinned(tensor)
    staged.copy_(tensor, non_blocking=True)
    gpu.mark(tensor.device).synchronize()
    return staged


class Landing:
    """Where a result for ``tensor`` is collected (``staged``), and the way from there."""

    def __init__(self, tensor: Tensor, gpu: Gpu = CUDA) -> None:
        self._tensor = tensor.detach()
        self._gpu = gpu
        # What the caller has queued may still use the old contents.
        self._before = gpu.mark(tensor.device)
        self.staged = gpu.pinned(tensor)

    def put(self) -> None:
        """Copy to the GPU, and return when it is there. Any thread."""
        # A stream apart: the thread that completes the op has none of the caller's.
        stream = self._gpu.side(self._tensor.device)
        stream.wait_event(self._before)
        with self._gpu.using(stream):
            self._tensor.copy_(self.staged, non_blocking=True)
        stream.synchronize()
