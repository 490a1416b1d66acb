"""Members of a forming group that will never join, because their process has ended.

A process publishes its ranks only after it has connected to its machine's peer. So one that is listed in a
group, has been connected and is not any more is dead, though it never took its seat.
"""

from __future__ import annotations

from collections.abc import Iterable

from frogzmq.types import GroupId

MAX_ENDED = 4096
"""Ended processes remembered, latest last; a number that comes again is forgotten."""


class Absent:
    """Fed by the rank service; tells which (group, rank) must be given up."""

    def __init__(self) -> None:
        self._ended: dict[int, str] = {}
        self._awaited: dict[int, set[tuple[GroupId, int]]] = {}

    def came(self, pid: int) -> None:
        """A process said hello: whoever had its number before is forgotten."""
        self._ended.pop(pid, None)

    def awaits(self, gid: GroupId, members: Iterable[tuple[int, int]]) -> list[tuple[int, str]]:
        """A group lists (rank, process) on this machine that have no seat: which never will, and why."""
        dead = []
        for rank, pid in members:
            if pid in self._ended:
                dead.append((rank, self._ended[pid]))
            else:
                self._awaited.setdefault(pid, set()).add((gid, rank))
        return dead

    def seated(self, gid: GroupId, rank: int, pid: int) -> None:
        """A rank has joined."""
        awaited = self._awaited.get(pid)
        if awaited is not None:
            awaited.discard((gid, rank))
            if not awaited:
                del self._awaited[pid]

    def ended(self, pid: int, reason: str) -> list[tuple[GroupId, int]]:
        """A process is gone: which seats of forming groups it will never take."""
        if len(self._ended) >= MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[pid] = reason
        return sorted(self._awaited.pop(pid, ()))
