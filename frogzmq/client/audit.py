"""Receipts and fingerprints compared over a group: collectives of the group itself, without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from frogzmq.client.group import GroupHandle
from frogzmq.content.ledger import Difference, first_difference
from frogzmq.content.manifest import root_of
from frogzmq.descriptor import Descriptor
from frogzmq.errors import ConfigError
from frogzmq.types import Digest, OpKind, ReduceOp

SETTLE_S = 5.0
"""How long receipts of ops that are done may take: they are hashed when there is nothing else to do."""
_POLL_S = 0.005


def gather(group: GroupHandle, data: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of ranks: two all_gathers, of lengths and of contents."""
    sizes = np.empty(group.size, np.int64)
    mine = np.array([len(data)], np.int64).view(np.uint8)
    op = group.post(_gathers("int64", 1), mine, (sizes.view(np.uint8),))
    op.wait()
    longest = int(sizes.max())
    if not longest:
        return [b""] * group.size
    padded = np.zeros(longest, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8) if data else 0
    everyone = np.empty(longest * group.size, np.uint8)
    group.post(_gathers("uint8", longest), padded, (everyone,)).wait()
    return [bytes(everyone[r * longest : r * longest + int(size)]) for r, size in enumerate(sizes)]


def _gathers(dtype: str, count: int) -> Descriptor:
    return Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, dtype, (count,))


def receipts(group: GroupHandle) -> list[dict[str, Any]]:
    """The receipts that this rank's machine keeps of the group, oldest first.

    Waits (at most ``SETTLE_S``) until those of all ops that were called here and are done are taken.
    ``ConfigError`` where the group keeps none.
    """
    if not group.witness:
        raise ConfigError(
            f"group {group.name!r} keeps no receipts: set FROGZMQ_RECEIPTS=1 or "
            "frogzmq.Options(receipts=True) on all ranks"
        )
    last = group.seq if group.done and not group.in_flight else 0
    until = time.monotonic() + SETTLE_S
    while True:
        rows = group.client.receipts(group.gid)
        taken = {row["seq"] for row in rows if row["state"] != "open"}
        whole = last in taken and all(row["seq"] in taken for row in rows if row["seq"] <= last)
        if whole or not last or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    me = str(group.rank)
    return [{**row, "mine": row["got"].get(me)} for row in rows]


def compare_receipts(group: GroupHandle) -> Difference | None:
    """Collective: the first op at which machines or ranks of the group differ, or None; the same on all.

    Every machine's log goes to every rank; ops that some machine no longer keeps are not compared.
    """
    rows = receipts(group)
    speaks = group.rank == min(rows[0]["machines"][rows[0]["host"]]["ranks"]) if rows else True
    logs = [json.loads(text or b"[]") for text in gather(group, json.dumps(rows if speaks else []).encode())]
    return first_difference(logs)


def compare_fingerprints(
    group: GroupHandle, prints: Mapping[str, Digest]
) -> tuple[tuple[int, ...], str] | None:
    """Collective: ranks whose tensors are not those of most, and the first name that differs; None: equal.

    One digest a rank where all is well; all of them only where it is not.
    """
    root = root_of(list(prints.values()))
    names = "\n".join(prints).encode()
    roots = gather(group, root + names)
    if len(set(roots)) == 1:
        return None
    table = json.dumps({name: digest.hex() for name, digest in prints.items()}).encode()
    tables = [json.loads(text) for text in gather(group, table)]
    most = max(set(roots), key=lambda each: (roots.count(each), -roots.index(each)))
    tied = sum(roots.count(each) == roots.count(most) for each in set(roots)) > 1
    odd = tuple(rank for rank, each in enumerate(roots) if tied or each != most)
    right = tables[roots.index(most)]
    others = [tables[rank] for rank, each in enumerate(roots) if each != most]
    everything = dict.fromkeys([*right, *(name for table in others for name in table)])
    name = next(n for n in everything if any(each.get(n) != right.get(n) for each in others))
    return odd, name
