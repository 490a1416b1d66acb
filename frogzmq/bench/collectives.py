"""One collective at one size on one rank: its tensors, the call, and what must come out.

The size is that of the whole tensor: what every rank gives to all_reduce, broadcast, reduce, reduce_scatter
and all_to_all, what comes together in all_gather and gather, what the root deals out in scatter. Where ranks
give or get a part, it is the size divided by their number. The root is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from frogzmq.bench.spec import GIVES, Held

_CHECK = 1 << 18
"""Elements that are compared at a time, so that checking needs no memory to speak of."""


class Piece(NamedTuple):
    """``got`` must be ``base * factor``."""

    got: torch.Tensor
    base: torch.Tensor
    factor: float


def pattern(numel: int) -> torch.Tensor:
    """Whole numbers 1..7, scaled down so that they stay finite through a block."""
    base = torch.arange(numel, dtype=torch.float32)
    return base.remainder_(7).add_(1).mul_(2.0**-20)


class Case:
    """The tensors of one rank for ``collective`` on ``nbytes`` of float32, used again and again.

    Rank r gives the pattern times r + 1. ``give`` and ``get`` are one tensor where torch works in place.
    """

    def __init__(self, collective: str, nbytes: int, rank: int, ranks: int) -> None:
        self.collective, self.nbytes, self.rank, self.ranks = collective, nbytes, rank, ranks
        numel = nbytes // 4
        self.part = numel // ranks
        self.base = pattern(numel)
        gives, gets = GIVES[collective]
        self.give = torch.empty(self._count(gives, numel))
        self.get = self.give if gets is Held.SAME else torch.empty(self._count(gets, numel))
        self._call: Callable[[Any], object] = getattr(self, f"_{collective}")

    def _count(self, held: Held, numel: int) -> int:
        if held is Held.PART:
            return self.part
        return numel if held is not Held.ROOT or self.rank == 0 else 0

    def fill(self) -> None:
        """Set the inputs; outputs hold what no collective gives."""
        if self.get is not self.give:
            self.get.fill_(-1.0)
        torch.mul(self.base[: self.give.numel()], self.rank + 1, out=self.give)

    def run(self, group: Any) -> None:
        """Call the collective and wait for it."""
        self._call(group)

    @property
    def spoils(self) -> bool:
        """Whether a second run on what the first one left has no defined result (Gloo's reduce works in
        the other ranks' tensors): the inputs must be set again before what comes out is compared."""
        return self.collective == "reduce"

    def pieces(self, runs: int) -> list[Piece]:
        """What must be in the outputs after ``runs`` runs (all_reduce sums sums) since ``fill``."""
        total = self.ranks * (self.ranks + 1) / 2
        mine = self.base[self.rank * self.part : (self.rank + 1) * self.part]
        each = list(self.get.chunk(self.ranks)) if self.get.numel() > self.part else []
        match self.collective:
            case "all_reduce":
                return [Piece(self.get, self.base, total * float(self.ranks) ** (runs - 1))]
            case "broadcast":
                return [Piece(self.get, self.base, 1.0)]
            case "reduce":
                return [Piece(self.get, self.base, total)] if self.rank == 0 else []
            case "scatter":
                return [Piece(self.get, mine, 1.0)]
            case "reduce_scatter":
                return [Piece(self.get, mine, total)]
            case "all_to_all":
                return [Piece(got, mine, rank + 1.0) for rank, got in enumerate(each or [self.get])]
            case _:  # all_gather, and gather where this rank is the root
                first = self.base[: self.part]
                whole = each or ([self.get] if self.get.numel() else [])
                return [Piece(got, first, rank + 1.0) for rank, got in enumerate(whole)]

    def check(self, label: str, runs: int) -> None:
        """Compare every element of the outputs; ``RuntimeError`` names the first that differs.

        Small whole numbers times powers of the rank count: exact for 2, 4 and 8 ranks.
        """
        tolerance = 0.0 if self.ranks & (self.ranks - 1) == 0 else 1e-6 * runs
        for index, piece in enumerate(self.pieces(runs)):
            for start in range(0, piece.got.numel(), _CHECK):
                got, expected = (
                    piece.got[start : start + _CHECK],
                    piece.base[start : start + _CHECK] * piece.factor,
                )
                if not torch.allclose(got, expected, rtol=tolerance, atol=0.0):
                    wrong = (got - expected).abs() > tolerance * expected
                    at = int((wrong | got.isnan()).nonzero()[0])
                    raise RuntimeError(
                        f"{label}: {self.collective} of {self.nbytes} bytes is wrong on rank {self.rank}: "
                        f"element {index * self.part + start + at} is {got[at].item()}, "
                        f"expected {expected[at].item()}"
                    )

    def _all_reduce(self, group: Any) -> None:
        dist.all_reduce(self.get, group=group)

    def _broadcast(self, group: Any) -> None:
        dist.broadcast(self.get, 0, group=group)

    def _reduce(self, group: Any) -> None:
        dist.reduce(self.get, 0, group=group)

    def _all_gather(self, group: Any) -> None:
        dist.all_gather_into_tensor(self.get, self.give, group=group)

    def _gather(self, group: Any) -> None:
        parts = list(self.get.chunk(self.ranks)) if self.rank == 0 else None
        dist.gather(self.give, parts, dst=0, group=group)

    def _scatter(self, group: Any) -> None:
        parts = list(self.give.chunk(self.ranks)) if self.rank == 0 else None
        dist.scatter(self.get, parts, src=0, group=group)

    def _reduce_scatter(self, group: Any) -> None:
        dist.reduce_scatter_tensor(self.get, self.give, group=group)

    def _all_to_all(self, group: Any) -> None:
        dist.all_to_all_single(self.get, self.give, group=group)
