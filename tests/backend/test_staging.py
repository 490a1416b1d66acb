"""The way of GPU tensors through pinned memory: on a stand-in that records the order, and on a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from frogzmq.backend import staging
from frogzmq.backend.tensors import read, write_into

pytestmark = pytest.mark.torch


class Recorder:
    """A ``Gpu`` without one: host memory, and a log of what was asked."""

    def __init__(self, watched: torch.Tensor) -> None:
        self.log: list[str] = []
        self.watched = watched

    def note(self, what: str) -> None:
        self.log.append(f"{what} {self.watched.flatten()[0].item():g}")

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        self.note("pinned")
        return torch.zeros(like.shape, dtype=like.dtype)

    def mark(self, device: torch.device) -> Any:
        self.note("mark")
        return Queue(self, "event")

    def side(self, device: torch.device) -> Any:
        return Queue(self, "side")

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.note("begin")
        yield
        self.note("end")


class Queue:
    """A stream or an event."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_event(self, event: Queue) -> None:
        self.recorder.note(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.recorder.note(f"host waits for {self.name}")


def test_a_contribution_is_on_the_host_before_the_call_goes_on() -> None:
    tensor = torch.arange(1.0, 7.0).reshape(2, 3).t()
    gpu = Recorder(tensor)
    staged = staging.fetch(tensor, gpu)
    assert torch.equal(staged, tensor)
    assert staged.is_contiguous()
    assert gpu.log == ["pinned 1", "mark 1", "host waits for event 1"]


def test_conjugation_happens_before_the_transfer() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    staged = staging.fetch(tensor, Recorder(torch.zeros(1)))
    assert not staged.is_conj()
    assert torch.equal(staged, tensor)


def test_a_result_lands_after_what_the_caller_queued_and_before_the_op_is_done() -> None:
    tensor = torch.ones(3, 2).t()
    gpu = Recorder(tensor)
    landing = staging.Landing(tensor, gpu)
    landing.staged.fill_(5.0)
    assert tensor[0, 0] == 1
    landing.put()
    assert (tensor == 5).all()
    assert gpu.log == [
        "mark 1", "pinned 1", "side waits for event 1", "begin 1", "end 5", "host waits for side 5",
    ]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_through_a_real_gpu() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 20, device="cuda")
        for _ in range(100):
            tensor += 1
        given = read(tensor)  # waits for all additions
        sinks, finish = write_into([tensor.view(1024, 1024).t()], "all_reduce")
        tensor += 1  # queued before the result comes
    assert (given.view("float32") == 100).all()
    sinks[0][:] = given
    assert finish is not None
    stream.synchronize()
    finish()
    assert (tensor == 100).all()
