"""Receipts as peers hand them out (plain JSON values), compared across machines.

A row is one op as one machine saw it; see ``proto.report``. Only ops of which every machine still keeps a
receipt can be compared: logs are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frogzmq.content.audit import Case, Testimony, describe, judge
from frogzmq.types import Digest

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first op of a group at which machines or ranks differ."""

    group: str
    seq: int
    what: str
    """The operation, for people."""
    machines: tuple[str, ...]
    """Names of the odd machines; of all where no majority tells who is right."""
    ranks: tuple[int, ...]
    """The odd ranks: they got other bytes, or live on an odd machine."""
    text: str

    def __str__(self) -> str:
        return self.text


def first_difference(logs: Iterable[Sequence[Row]]) -> Difference | None:
    """Compare the logs of several machines; None where every op that can be compared agrees.

    With several groups, the one whose name comes first.
    """
    ops: dict[tuple[str, str, int], dict[int, Row]] = {}
    for row in (row for log in logs for row in log):
        if row.get("said"):
            ops.setdefault((str(row["group"]), str(row["gid"]), int(row["seq"])), {})[int(row["host"])] = row
    for key in sorted(ops):
        found = _compare(ops[key])
        if found is not None:
            return found
    return None


def _compare(rows: Mapping[int, Row]) -> Difference | None:
    """One op, by machine. One machine's row is enough to see what its ranks got."""
    row = next(iter(rows.values()))
    machines = row["machines"]
    ranks = tuple(tuple(machine["ranks"]) for machine in machines)
    root, cast = int(row["root"]), row["kind"] == "broadcast"
    readers = frozenset(rank for each in ranks for rank in each if not (cast and rank == root))
    source = next((host for host, each in enumerate(ranks) if cast and root in each), -1)
    case = Case(ranks, readers, len(row["parts"]), source)
    found = judge(case, {host: _testimony(each["said"]) for host, each in rows.items()})
    if found is None:
        return None
    names = [machine_text(machine["name"], machine["ranks"]) for machine in machines]
    text = f"op {row['seq']} {row['what']} of group {row['group']!r}: {describe(found, names)}"
    odd = tuple(str(machines[host]["name"]) for host in found.hosts)
    return Difference(str(row["group"]), int(row["seq"]), str(row["what"]), odd, found.ranks, text)


def machine_text(name: str, ranks: Sequence[int]) -> str:
    """A machine and its ranks, for people."""
    return f"machine {name} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"


def _testimony(said: Row) -> Testimony:
    return Testimony(
        _digest(said["op"]),
        tuple((int(part), _digest(root)) for part, root in said["given"]),
        _digest(said["held"]) if said["held"] else None,
        _digest(said["result"]) if said["result"] else None,
        tuple((int(rank), _digest(root)) for rank, root in said["odd"]),
    )


def _digest(text: str) -> Digest:
    return Digest(bytes.fromhex(text))
