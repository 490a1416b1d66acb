"""What is measured on the way to one peer: round-trip time and rates. No I/O; time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class RttEstimate:
    """Round-trip time smoothed as RFC 6298 says (alpha 1/8, beta 1/4); seconds, negative before a sample."""

    smoothed: float = -1.0
    variation: float = 0.0
    least: float = math.inf

    def sample(self, rtt: float) -> None:
        """Take one measurement; negative ones (a clock that went back) are ignored."""
        if rtt < 0.0:
            return
        self.least = min(self.least, rtt)
        if self.smoothed < 0.0:
            self.smoothed, self.variation = rtt, rtt / 2
            return
        self.variation += (abs(self.smoothed - rtt) - self.variation) / 4
        self.smoothed += (rtt - self.smoothed) / 8

    @property
    def timeout(self) -> float:
        """RFC 6298 retransmission timeout without its one-second floor; infinity before a sample."""
        return math.inf if self.smoothed < 0.0 else self.smoothed + max(4 * self.variation, 0.01)


@dataclass(slots=True)
class RateMeter:
    """Bytes per second, forgetting with time constant ``memory_s``; also the highest rate seen."""

    memory_s: float = 2.0
    total: int = 0
    peak: float = 0.0
    _held: float = 0.0
    _at: float = -math.inf

    def add(self, nbytes: int, now: float) -> None:
        """Count ``nbytes`` that moved at ``now``."""
        self._held = self._decayed(now) + nbytes
        self._at = now
        self.total += nbytes
        self.peak = max(self.peak, self._held / self.memory_s)

    def rate(self, now: float) -> float:
        """Bytes per second about ``now``."""
        return self._decayed(now) / self.memory_s

    def _decayed(self, now: float) -> float:
        return self._held * math.exp(-max(0.0, now - self._at) / self.memory_s) if self._held else 0.0
