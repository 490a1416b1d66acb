"""Ranks that make their groups in different orders wait for each other: what each asks for, told to both.

A rank that waits long for the others of a group writes into the store for whom it waits, and looks what those
ask for meanwhile. Nothing is written or read while groups form as fast as they should.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from frogzmq.errors import Mismatch

_LAYERS = 2
"""Prefixes that torch puts around the world's store for a group: its name, and the device."""

_lock = threading.Lock()
_open = 0


class Asks:
    """What this rank asks for; ``ranks`` are the group's members as the whole job numbers them, or none.

    ``token`` names this process. Use as a context manager around the wait.
    """

    def __init__(self, store: Store, name: str, ranks: Sequence[int], rank: int, token: str) -> None:
        self._store = _world_store(store) if ranks else None
        self._group = f"group {name!r} of ranks {list(ranks)}"
        self._ranks, self._me = ranks, ranks[rank] if ranks else rank
        self._token = token
        self._beat = 0
        self._seen: dict[int, int] = {}

    def __enter__(self) -> Asks:
        global _open
        with _lock:
            _open += 1
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        global _open
        with _lock:
            _open -= 1
        if self._store is not None and self._beat and kind is None:
            self._write([])

    def look(self, missing: Iterable[int]) -> None:
        """Say for whom this rank waits; ``Mismatch`` where one of them waits for this one elsewhere."""
        if self._store is None:
            return
        waited = [self._ranks[rank] for rank in missing]
        self._beat += 1
        self._write(waited)
        for rank in waited:
            ask = self._read(rank)
            if ask is None or ask["group"] == self._group or self._me not in ask["missing"]:
                continue
            # Alive and still at it: it wrote again since this rank looked before. Or it has seen it already.
            again = self._seen.get(rank, ask["beat"]) != ask["beat"]
            self._seen[rank] = ask["beat"]
            alone = _open == 1 and ask["open"] == 1  # threads may make groups in any order
            if (again and alone) or ask["against"] == [self._token, self._group]:
                self._write(waited, [ask["token"], ask["group"]])
                raise Mismatch(
                    f"ranks make groups in different orders: rank {self._me} waits in {self._group} for "
                    f"rank {rank}, which waits in {ask['group']} for rank {self._me}; all ranks must call "
                    "new_group for the same groups in the same order, or with use_local_synchronization=True"
                )

    def others(self, missing: Iterable[int]) -> str:
        """What those who are missing ask for, as far as they wait themselves."""
        texts = []
        for rank in [self._ranks[rank] for rank in missing] if self._store is not None else ():
            ask = self._read(rank)
            if ask is not None and ask["missing"] and ask["group"] != self._group:
                texts.append(f"; rank {rank} of the job waits in {ask['group']} for ranks {ask['missing']}")
        return "".join(texts)

    def _write(self, missing: Sequence[int], against: Sequence[str] = ()) -> None:
        assert self._store is not None
        record = {
            "group": self._group, "missing": list(missing), "beat": self._beat, "open": _open,
            "token": self._token, "against": list(against),
        }  # fmt: skip
        self._store.set(f"frogzmq asks/{self._me}", json.dumps(record))

    def _read(self, rank: int) -> dict[str, Any] | None:
        assert self._store is not None
        key = f"frogzmq asks/{rank}"
        if not self._store.check([key]):
            return None
        record: dict[str, Any] = json.loads(self._store.get(key))
        return record


def _world_store(store: Store) -> Store | None:
    """The store that all groups of the job share."""
    for _ in range(_LAYERS):
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            return None
        store = inner
    return store
