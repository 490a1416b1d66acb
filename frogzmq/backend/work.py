"""Handles of running collectives: ``torch.distributed.Work`` over an ``Op``.

Futures are made on demand only (they cost more than a small op), and fail through a ``.then`` that raises:
a future failed with ``set_exception`` crashes DDP's reducer. They are completed on threads that may block,
since callbacks of communication hooks wait for further collectives.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from frogzmq.backend.errors import FrogError, surface
from frogzmq.client import Op
from frogzmq.client.letters import Letter
from frogzmq.errors import FrogError as PlainError

IDLE_S = 30.0
MAX_THREADS = 32
"""Callbacks that wait for each other's collectives need a thread each; more than a few is a design error."""


class FrogWork(Work):
    """One collective; ``outputs`` are the tensors that hold its result."""

    def __init__(self, op: Op | Letter, outputs: Sequence[torch.Tensor], name: str, root: int = -1) -> None:
        super().__init__()
        self._op = op
        self.outputs = outputs
        self._name = name
        self._root = root
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result stands in the outputs; raise the op's error.

        ``timeout`` (None, zero or negative: the op's own) bounds this wait only: the op goes on.
        """
        seconds = None if timeout is None else timeout.total_seconds()
        try:
            self._op.wait(seconds if seconds is None or seconds > 0 else None)
        except PlainError as error:
            raise surface(error) from None
        return True

    def synchronize(self) -> None:
        """The same as ``wait``: results on a GPU are complete when the op is."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the op is done, well or not."""
        return self._op.is_done()

    def is_success(self) -> bool:
        """Whether the op is done and did not fail."""
        return self._op.is_done() and self._op.error is None

    def exception(self) -> FrogError | None:
        """The op's error, or None (also while it runs)."""
        error = self._op.error if self._op.done else None
        return None if error is None else surface(error)

    def result(self) -> list[torch.Tensor]:
        """The output tensors; raises before completion, and the op's error after a failure."""
        if not self.is_completed():
            raise FrogError(f"{self._name}: result() before the operation is complete; call wait() first")
        error = self.exception()
        if error is not None:
            raise error
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of output tensors; the same one at every call."""
        if self._future is None:
            gpus: list[int | str | torch.device] = [t.device for t in self.outputs if t.is_cuda]
            gate: torch.futures.Future[None] = torch.futures.Future(devices=gpus[:1] or None)
            self._future = gate.then(self._finish)
            self._op.add_done_callback(lambda _: completer.submit(lambda: gate.set_result(None)))
        return self._future

    def _finish(self, _: torch.futures.Future[None]) -> list[torch.Tensor]:
        error = self._op.error
        if error is not None:
            raise surface(error)
        return list(self.outputs)

    def source_rank(self) -> int:
        """The rank that the data came from; only broadcast has one."""
        if self._root < 0:
            raise FrogError(f"{self._name}: source_rank() has no meaning for this operation")
        return self._root

    def _source_rank(self) -> int:
        return self.source_rank()


class Completer:
    """Threads that complete futures: as many as block at once, gone when idle or stopped."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` soon, on a thread that it may block."""
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of the threads
        with self._lock:
            self._waiting += 1
            if self._waiting > self._idle and len(self._threads) < MAX_THREADS:
                thread = threading.Thread(target=self._run, name="frogzmq-futures", daemon=True)
                self._threads.append(thread)
                self._idle += 1
                thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                job = None
            with self._lock:
                if job is None and self._waiting:
                    continue
                self._idle -= 1
                if job is None:
                    self._threads.remove(threading.current_thread())
                    return
                self._waiting -= 1
            job()
            with self._lock:
                self._idle += 1

    def stop(self) -> None:
        """Let all threads finish what they do and end (called at shutdown and at exit)."""
        if self._pid != os.getpid():
            return
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)


completer = Completer()
