"""Virtual time: a heap of things to do, named random streams, and a hash of everything that happened.

Rules that make a run replayable from its seed: one random stream per concern, seeded by text; ties in
time are broken by the order of scheduling; nothing iterates a set. Two runs with one seed have one
``trace`` digest, whatever ``PYTHONHASHSEED`` is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush

from blake3 import blake3

from frogzmq.errors import DeadlineExceeded


class World:
    """A virtual clock in seconds and what is scheduled on it."""

    def __init__(self, seed: str = "0") -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._trace = blake3()

    def rng(self, concern: str) -> random.Random:
        """A random stream of its own for one concern."""
        return random.Random(f"{self.seed}:{concern}")

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do ``action`` ``delay_s`` from now."""
        self._count += 1
        heappush(self._heap, (self.now + max(delay_s, 0.0), self._count, action))

    def note(self, text: str) -> None:
        """Add to the trace: what happened, when."""
        self._trace.update(f"{self.now:.9f} {text}\n".encode())

    @property
    def trace(self) -> str:
        """Digest of all that was noted so far."""
        return self._trace.hexdigest()

    def step(self) -> bool:
        """Do the next thing; False when nothing is scheduled."""
        if not self._heap:
            return False
        self.now, _, action = heappop(self._heap)
        self.steps += 1
        action()
        return True

    def run(self, until: Callable[[], bool], limit_s: float = 60.0, max_steps: int = 2_000_000) -> None:
        """Step until ``until()``; ``DeadlineExceeded`` after ``limit_s`` virtual seconds."""
        end, last = self.now + limit_s, self.steps + max_steps
        while not until():
            if self.now > end or self.steps > last or not self.step():
                raise DeadlineExceeded(
                    f"the simulated world did not get there by t={self.now:.3f} s "
                    f"({self.steps} steps, seed {self.seed!r})"
                )

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.step()
        self.now = end
