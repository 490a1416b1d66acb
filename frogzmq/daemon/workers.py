"""Threads for hashing and folding, and their completion queue.

Only numpy and BLAKE3 run in them (both release the GIL); what to do with an outcome is the loop's
business. Work of a lower op number goes first, so that the op everybody waits for is not held up by
the ones behind it. The queue needs no bound of its own: local work is bounded by the ops in flight
per group, received chunks by the credits given to their senders.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

Task = Callable[[], Any]


class Outcome(NamedTuple):
    """What became of a task: ``value``, or ``error`` if it raised. ``tag`` is the submitter's own."""

    tag: Any
    value: Any
    error: BaseException | None


class Workers:
    """A pool of ``threads`` threads; ``fd`` becomes readable when ``finished`` has something."""

    def __init__(self, threads: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: list[tuple[int, int, Any, Task]] = []
        self._done: deque[Outcome] = deque()
        self._number = count()
        self._changed = threading.Condition()
        self._closing = False
        self.submitted = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"frogzmq-worker-{i}", daemon=True)
            for i in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        """Number of threads."""
        return len(self._threads)

    @property
    def waiting(self) -> int:
        """Tasks that no thread has taken yet."""
        return len(self._queue)

    def submit(self, priority: int, tag: Any, task: Task) -> None:
        """Queue ``task``; lower ``priority`` first, equal ones in the order of submission."""
        self.submitted += 1
        with self._changed:
            heapq.heappush(self._queue, (priority, next(self._number), tag, task))
            self._changed.notify()

    def finished(self) -> list[Outcome]:
        """Outcomes since the last call."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        done = self._done
        return [done.popleft() for _ in range(len(done))]

    def close(self, timeout: float = 2.0) -> bool:
        """Drop queued tasks and wait for running ones; ``False`` if some thread did not end in time."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        share = timeout / len(self._threads)
        for thread in self._threads:
            thread.join(share)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            os.close(self.fd)
        return ended

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                _, _, tag, task = heapq.heappop(self._queue)
            try:
                outcome = Outcome(tag, task(), None)
            except BaseException as error:  # handed to the loop, which decides
                outcome = Outcome(tag, None, error)
            self._done.append(outcome)
            os.eventfd_write(self.fd, 1)
            del task, outcome  # a chunk's bytes must not live until the next task
