"""Links between simulated peers: delay, rate, loss, damage, duplication, and cuts.

Control messages ride a reliable, ordered stream (as TCP gives); a *cut* breaks streams, drops what was
under way and is seen by both ends as ``LinkDown``, then ``LinkUp`` once healed. ``loss`` drops single
chunks all the same, ``damage`` flips a bit in one: what real links only do when something is broken, and
what repair must survive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frogzmq.sim.world import World


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two machines."""

    delay_s: float = 0.001
    jitter_s: float = 0.0
    rate: float = 1e9
    """Bytes per second."""
    loss: float = 0.0
    duplicate: float = 0.0
    damage: float = 0.0


class Network:
    """All directions between all machines; ``default`` where nothing else was set."""

    def __init__(self, world: World, default: LinkModel | None = None) -> None:
        self.world = world
        self.default = default or LinkModel()
        self._links: dict[tuple[str, str], LinkModel] = {}
        self._free_at: dict[tuple[str, str], float] = {}
        self._cut: dict[tuple[str, str], bool] = {}
        self._rng = world.rng("network")
        self.sent_bytes: dict[tuple[str, str], int] = {}

    def set(self, source: str, target: str, model: LinkModel) -> None:
        """Change one direction, also while traffic runs."""
        self._links[source, target] = model

    def cut(self, a: str, b: str) -> None:
        """Nothing passes between two machines any more."""
        self._cut[a, b] = self._cut[b, a] = True

    def heal(self, a: str, b: str) -> None:
        """Undo ``cut``."""
        self._cut[a, b] = self._cut[b, a] = False

    def is_cut(self, a: str, b: str) -> bool:
        """Whether nothing passes."""
        return self._cut.get((a, b), False)

    def send(
        self, source: str, target: str, nbytes: int, deliver: Callable[[bool], None], *, lossy: bool
    ) -> None:
        """Carry ``nbytes``; ``deliver(damaged)`` runs on arrival. ``lossy``: may be lost."""
        model = self._links.get((source, target), self.default)
        key = (source, target)
        self.sent_bytes[key] = self.sent_bytes.get(key, 0) + nbytes
        if self.is_cut(source, target):
            return
        start = max(self._free_at.get(key, 0.0), self.world.now)
        self._free_at[key] = start + nbytes / model.rate
        copies = 1
        damaged = False
        if lossy:
            copies = 0 if self._rng.random() < model.loss else 1
            copies += self._rng.random() < model.duplicate
            damaged = self._rng.random() < model.damage
        jitter = self._rng.random() * model.jitter_s
        arrival = self._free_at[key] + model.delay_s + jitter - self.world.now
        for _ in range(copies):
            self.world.after(arrival, lambda: self._arrive(source, target, damaged, deliver))

    def _arrive(self, source: str, target: str, damaged: bool, deliver: Callable[[bool], None]) -> None:
        if not self.is_cut(source, target):
            deliver(damaged)
