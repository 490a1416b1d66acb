"""What the machines of a group say of one op, set beside each other: who is the odd one out, and in what.

A ``Testimony`` is short, whatever the size of the group: roots of the parts that the machine gave, one
digest over the roots of all parts as it holds them, the root of its result, and only those of its ranks
that got something else. ``judge`` is a pure function of all testimonies, so every machine comes to the same
verdict, word for word.

What this proves is bits, not honesty: a machine that lies about its digests is believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from frogzmq.types import Digest

_PARTS = blake3(derive_key_context="frogzmq 2026 v1 parts")


def digest_parts(roots: Iterable[Digest]) -> Digest:
    """One digest over the roots of all parts, in the order in which they are folded."""
    hasher = _PARTS.copy()
    hasher.update(b"".join(roots))
    return Digest(hasher.digest())


@dataclass(frozen=True, slots=True)
class Testimony:
    """What one machine says of one op."""

    descriptor: Digest
    given: tuple[tuple[int, Digest], ...] = ()
    """Part index and root of each part that the machine gave."""
    held: Digest | None = None
    """``digest_parts`` of all parts as it observed them; None where it did not see all of their bytes."""
    result: Digest | None = None
    """Root of the machine's result; None where it has none, or has its own that no other compares with."""
    odd: tuple[tuple[int, Digest], ...] = ()
    """Its ranks that got other bytes than the machine had for them, with the root of what they got."""


@dataclass(frozen=True, slots=True)
class Case:
    """What must be known of an op to judge it: ``ranks[host]`` live there, ``source`` decides, if any."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each machine."""
    readers: frozenset[int]
    """Ranks that get a result."""
    parts: int
    """How many parts the op has."""
    source: int = -1
    """The machine that all results come from (broadcast): what it has is right by definition."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first thing in which an op differs, and whose it is."""

    what: str
    """``descriptor``, ``parts``, ``result`` or ``rank``."""
    hosts: tuple[int, ...]
    """Machines that are odd; every one that has a say where nobody can tell."""
    ranks: tuple[int, ...]
    """Ranks that are odd: those that got other bytes, or live on an odd machine."""
    certain: bool
    """Whether there is a majority, or a source, that says who is right."""


def judge(case: Case, heard: Mapping[int, Testimony]) -> Divergence | None:
    """Compare what machines (host index -> testimony) say; None where all agree."""
    return _descriptors(case, heard) or _parts(case, heard) or _results(case, heard)


def _descriptors(case: Case, heard: Mapping[int, Testimony]) -> Divergence | None:
    odd, certain = _odd({host: each.descriptor for host, each in heard.items()})
    return _machines("descriptor", case, odd, certain) if odd else None


def _parts(case: Case, heard: Mapping[int, Testimony]) -> Divergence | None:
    """A part is what the machine that gave it says: who holds another is odd."""
    given = {part: root for each in heard.values() for part, root in each.given}
    if len(given) != case.parts:
        return None
    truth = digest_parts(given[part] for part in sorted(given))
    odd = [host for host, each in heard.items() if each.held not in (None, truth)]
    return _machines("parts", case, odd, True) if odd else None


def _results(case: Case, heard: Mapping[int, Testimony]) -> Divergence | None:
    results = {host: each.result for host, each in heard.items() if each.result is not None}
    hosts, certain = _odd(results, case.source)
    alone = [host for host, each in heard.items() if _outvoted(case, host, each)]
    if alone and (certain or not hosts):
        return _machines("result", case, sorted({*hosts, *alone}), True)
    if hosts:
        return _machines("result", case, hosts, certain)
    ranks = tuple(sorted(rank for each in heard.values() for rank, _ in each.odd))
    return Divergence("rank", (), ranks, True) if ranks else None


def _outvoted(case: Case, host: int, said: Testimony) -> bool:
    """Whether several ranks of a machine got the same, and the machine itself holds something else."""
    readers = [rank for rank in case.ranks[host] if rank in case.readers]
    got = {root for _, root in said.odd}
    return said.result is not None and len(readers) > 1 and len(said.odd) == len(readers) and len(got) == 1


def _odd(values: Mapping[int, Digest], source: int = -1) -> tuple[list[int], bool]:
    """Hosts that differ from what counts as right, and whether anything does; all of them if not."""
    if len(set(values.values())) < 2:
        return [], True
    if source in values:
        return [host for host, value in values.items() if value != values[source]], True
    (first, most), (_, next_most) = Counter(values.values()).most_common(2)
    if most == next_most:
        return sorted(values), False
    return sorted(host for host, value in values.items() if value != first), True


def _machines(what: str, case: Case, hosts: Sequence[int], certain: bool) -> Divergence:
    hosts = tuple(sorted(hosts))
    ranks = tuple(sorted(rank for host in hosts for rank in case.ranks[host]))
    return Divergence(what, hosts, ranks, certain)


def describe(found: Divergence, machines: Sequence[str]) -> str:
    """Say for people what differs; ``machines`` are their names with their ranks."""
    names = [machines[host] for host in found.hosts]
    if found.what == "rank":
        several = len(found.ranks) > 1
        which = ", ".join(map(str, found.ranks))
        return (
            f"rank{'s' * several} {which} got other bytes than {'their' if several else 'its'} machine holds"
        )
    if not found.certain:
        return (
            f"{' and '.join(names)} have different {_THINGS[found.what]}, and no majority tells who is right"
        )
    verb = "have" if len(names) > 1 else "has"
    return f"{' and '.join(names)} {verb} {_OTHER[found.what]}"


_THINGS = {"descriptor": "operations", "result": "results", "parts": "contributions"}
_OTHER = {
    "descriptor": "another operation than most",
    "parts": "folded other contributions than were given",
    "result": "another result than it should",
}
