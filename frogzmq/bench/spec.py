"""What a benchmark run is asked to do, and how sizes are read and written. No I/O, no torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from enum import Enum

SIZES = (4, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
"""Bytes of the tensor."""
COLLECTIVES_SIZE = 64 << 20
"""Bytes of the tensor where the collectives are measured side by side."""
MARK = "@"
"""First character of a line that a rank prints for the command."""
MAX_SIZE = 4 << 30
MAX_BLOCK = 48
"""Iterations in a block at most, so that backends alternate often."""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Held(Enum):
    """How much of the whole tensor every rank holds on one side of a collective."""

    WHOLE = "all of it"
    PART = "its share"
    ROOT = "rank 0 all of it, others nothing"
    SAME = "the tensor that it gave"


GIVES: dict[str, tuple[Held, Held]] = {
    "all_reduce": (Held.WHOLE, Held.SAME),
    "broadcast": (Held.WHOLE, Held.SAME),
    "reduce": (Held.WHOLE, Held.SAME),
    "all_gather": (Held.PART, Held.WHOLE),
    "gather": (Held.PART, Held.ROOT),
    "scatter": (Held.ROOT, Held.PART),
    "reduce_scatter": (Held.WHOLE, Held.PART),
    "all_to_all": (Held.WHOLE, Held.WHOLE),
}
"""Collective -> what ranks give and what they get."""
COLLECTIVES = tuple(GIVES)


@dataclass(frozen=True)
class Layout:
    """``ranks`` training processes spread evenly over ``peers`` machines (runtime directories)."""

    ranks: int
    peers: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.peers < 1:
            raise ValueError(f"a layout needs at least 1 rank and 1 peer, not {self.ranks} and {self.peers}")
        if self.ranks < self.peers:
            raise ValueError(f"{self.ranks} rank(s) cannot be spread over {self.peers} peers: each needs one")

    def host_of(self, rank: int) -> int:
        """The machine of a rank: neighbours share one."""
        return rank * self.peers // self.ranks

    def ranks_of(self, host: int) -> list[int]:
        """The ranks of a machine."""
        return [rank for rank in range(self.ranks) if self.host_of(rank) == host]

    def describe(self) -> str:
        """``4 ranks on 2 peers``."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} on {self.peers} peer{'s' * (self.peers > 1)}"


@dataclass(frozen=True)
class Spec:
    """What the command asks of every rank."""

    ranks: int
    peers: int
    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float
    """Time for one size, all backends together."""
    block_s: float
    """About how long one turn lasts."""
    collectives: tuple[str, ...] = ("all_reduce",)

    def cells(self) -> list[tuple[str, int]]:
        """What is measured, in order: collectives with the bytes of their tensor."""
        return [(collective, nbytes) for nbytes in self.sizes for collective in self.collectives]

    def to_text(self) -> str:
        """For a rank's command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Spec:
        """Read what ``to_text`` wrote."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("backends", "sizes", "collectives")}
        return Spec(**{**values, **lists})


def tensor_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes of the benchmark's own tensors on all ranks: given, got, compared with."""
    share = {Held.WHOLE: ranks * nbytes, Held.PART: nbytes, Held.ROOT: nbytes, Held.SAME: 0}
    return ranks * nbytes + sum(share[held] for held in GIVES[collective])


def labels_of(backends: tuple[str, ...]) -> list[str]:
    """``gloo, gloo`` -> ``gloo, gloo#2``: every contender gets a name of its own."""
    return [
        f"{name}#{backends[:index].count(name) + 1}" if name in backends[:index] else name
        for index, name in enumerate(backends)
    ]


def block_length(warm_s: float, budget_s: float, ranks: int) -> int:
    """Iterations of a block that shall last ``budget_s`` when one takes about ``warm_s``.

    Bounded also because values grow by the number of ranks each time and must stay finite in float32.
    """
    finite = int(96 / math.log2(max(ranks, 2)))
    return max(1, min(MAX_BLOCK, finite, round(budget_s / max(warm_s, 1e-6))))


def parse_size(text: str) -> int:
    """``4``, ``4k``, ``256KiB``, ``64M`` -> bytes of float32; ``ValueError`` that says why not."""
    match = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise ValueError(f"size {text!r} is not understood: write 4, 4k, 256KiB or 64M")
    size = int(match[1]) * _UNITS[match[2]]
    if size < 4 or size % 4:
        raise ValueError(
            f"size {text!r} is {size} bytes; a tensor of float32 needs a multiple of 4, at least 4"
        )
    if size > MAX_SIZE:
        raise ValueError(f"size {text!r} is above the limit of {format_size(MAX_SIZE)}")
    return size


def format_size(nbytes: float) -> str:
    """``4 B``, ``256 KiB``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
