"""Receipts: what one machine did in one op, in a form that two machines can compare.

Equal receipts on all machines mean that all folded the same contributions into the same result. Where
they differ, ``compare`` says in what and ``accuse`` says who: a contribution is what the machine that
gave it says it is; a result is what most of those say who folded the same contributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blake3 import blake3

from frogzmq.content.chunks import DIGEST_BYTES
from frogzmq.errors import WireError
from frogzmq.types import Digest

_RECEIPT = blake3(derive_key_context="frogzmq 2026 v1 receipt")


@dataclass(frozen=True)
class Receipt:
    """Op number, descriptor digest, roots of the parts in the order they are folded, result root."""

    seq: int
    descriptor: Digest
    parts: tuple[Digest, ...]
    result: Digest

    @cached_property
    def digest(self) -> Digest:
        """One digest over everything; ``WireError`` where a field is not a digest."""
        fields = (self.descriptor, *self.parts, self.result)
        if any(len(field) != DIGEST_BYTES for field in fields):
            raise WireError(f"receipt of op {self.seq} holds a digest that is not {DIGEST_BYTES} bytes")
        hasher = _RECEIPT.copy()
        hasher.update(self.seq.to_bytes(8, "little") + len(self.parts).to_bytes(8, "little"))
        hasher.update(b"".join(fields))
        return Digest(hasher.digest())


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two receipts differ: ``what`` is op, descriptor, parts, part or result."""

    what: str
    part: int
    """Index of the part that differs; -1 for everything else."""
    mine: str
    theirs: str

    def describe(self) -> str:
        """One line for people."""
        place = f" {self.part}" if self.part >= 0 else ""
        return f"{self.what}{place}: {self.mine} here, {self.theirs} there"


def compare(mine: Receipt, theirs: Receipt) -> tuple[Difference, ...]:
    """Everything in which two receipts differ, empty where they are equal."""
    found: list[Difference] = []

    def note(what: str, part: int, ours: object, others: object) -> None:
        if ours != others:
            found.append(Difference(what, part, _short(ours), _short(others)))

    note("op", -1, mine.seq, theirs.seq)
    note("descriptor", -1, mine.descriptor, theirs.descriptor)
    note("parts", -1, len(mine.parts), len(theirs.parts))
    for part, (ours, others) in enumerate(zip(mine.parts, theirs.parts, strict=False)):
        note("part", part, ours, others)
    note("result", -1, mine.result, theirs.result)
    return tuple(found)


def accuse(receipts: Mapping[str, Receipt], origins: Sequence[str]) -> dict[str, str]:
    """Say who is wrong, and in what: machine name -> reason; empty where all receipts are equal.

    ``origins[i]`` names the machine that gave part i. Machines without a receipt are not judged. Where
    no result has a majority nobody can tell, and everyone is named.
    """
    guilty = _strangers(receipts, len(origins))
    for name, receipt in receipts.items():
        if name in guilty:
            continue
        for part, origin in enumerate(origins):
            truth = receipts.get(origin) if origin not in guilty else None
            if truth is not None and receipt.parts[part] != truth.parts[part]:
                guilty[name] = f"holds other bytes for part {part} than {origin}, which gave it"
                break
    honest = {name: receipt for name, receipt in receipts.items() if name not in guilty}
    return guilty | _odd_results(honest)


def _strangers(receipts: Mapping[str, Receipt], parts: int) -> dict[str, str]:
    """Machines whose receipt is of another op than most, or of another number of parts."""
    ops = Counter((receipt.seq, receipt.descriptor) for receipt in receipts.values())
    usual, found = _most(ops), {}
    for name, receipt in receipts.items():
        if (receipt.seq, receipt.descriptor) not in usual:
            found[name] = "took part in another operation than most"
        elif len(receipt.parts) != parts:
            found[name] = f"counts {len(receipt.parts)} parts where there are {parts}"
    return found


def _odd_results(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    """Machines that got another result from the same parts than most did."""
    results = Counter(receipt.result for receipt in receipts.values())
    likely = _most(results)
    if len(likely) > 1:
        reason = "result differs and no result has a majority: fold the parts again to tell who is wrong"
        return dict.fromkeys(receipts, reason)
    reason = "folded the same parts into another result than most"
    return {name: reason for name, receipt in receipts.items() if receipt.result not in likely}


def _most(counts: Mapping[Any, int]) -> set[Any]:
    """The keys that are most common."""
    top = max(counts.values(), default=0)
    return {key for key, count in counts.items() if count == top}


def _short(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
