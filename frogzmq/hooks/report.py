"""What the variants keep on record: contributions used and skipped, step by step."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT_STEPS = 4096
"""Steps whose report is kept one by one; the totals cover all."""


class StepReport(NamedTuple):
    """One step of one rank.

    A contribution is what one rank gave to one exchange: one bucket of gradients, or one outer step.
    """

    step: int
    """Counted from 1."""
    used: int
    """Contributions in the outcome, this rank's own included."""
    skipped: int
    """Contributions that would have been in a DDP step and are not in this one."""
    missing: tuple[int, ...]
    """Group ranks of which at least one contribution was skipped."""


class Report:
    """``steps``: the last reports, oldest first; ``used`` and ``skipped``: totals since the start."""

    def __init__(self) -> None:
        self.steps: deque[StepReport] = deque(maxlen=KEPT_STEPS)
        self.used = self.skipped = self.count = 0

    def add(self, used: int, skipped: int, missing: tuple[int, ...] = ()) -> None:
        """Put one step on record."""
        self.count += 1
        self.used += used
        self.skipped += skipped
        self.steps.append(StepReport(self.count, used, skipped, missing))

    def __str__(self) -> str:
        total = self.used + self.skipped
        share = f" ({self.used / total:.1%})" if total else ""
        return f"{self.count} steps: {self.used} contributions used{share}, {self.skipped} skipped"
