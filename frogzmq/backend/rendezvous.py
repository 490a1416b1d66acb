"""How the ranks of a new group learn of each other: through the store that torch hands to the creator.

Each rank claims its number, publishes where it lives and how its machine's peer is reached, and reads the
same of all others. Keys carry a generation, so a process that makes the same group again (an agent's store
outlives the group) never reads what the last one left.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from blake3 import blake3
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from frogzmq.backend.asks import Asks
from frogzmq.errors import DeadlineExceeded, DuplicateIdentity, WireError
from frogzmq.wire.messages import Identity, Member

logger = logging.getLogger("frogzmq")

LOOK_S = 2.0
"""Longest single wait inside the store: C++ does not notice Ctrl-C before it returns."""
REPORT_S = 5.0
"""How often waiting ranks say who is missing."""
CLAIM_S = 4.0
"""How long a second claimant of a rank waits to learn who the first one is."""
_CONTEXT = "frogzmq 2026 v1 group id"

_token = ("", 0)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank knows afterwards: the group's id (hex) and its members, by rank."""

    gid: str
    members: list[Member]


def process_token() -> str:
    """A random name of this process, to tell it from an earlier one with the same number."""
    global _token
    if _token[1] != os.getpid():
        _token = (secrets.token_hex(8), os.getpid())
    return _token[0]


def meet(
    store: Store,
    name: str,
    rank: int,
    size: int,
    who: Identity,
    timeout_s: float,
    ranks: Sequence[int] = (),
) -> Meeting:
    """Publish this rank and wait for all others.

    ``ranks``: the group's members as the whole job numbers them. torch counts names per process, so groups of
    other members may bear the same name where not every rank makes every group.

    ``DuplicateIdentity`` where another process has claimed ``rank`` (within 5 s, naming it);
    ``DeadlineExceeded`` after ``timeout_s``, naming who is missing; ``Mismatch`` where ranks wait for each
    other in different groups (within 20 s).
    """
    deadline = time.monotonic() + timeout_s
    member = Member(rank=rank, pid=os.getpid(), host=socket.gethostname()[:256], who=who)
    scoped = _scoped(store, ranks)
    generation = _claim(scoped, name, rank)
    record = {"member": member.model_dump(mode="json"), "token": process_token()}
    if rank == 0:
        record["session"] = secrets.token_hex(16)
    scoped.set(_key(rank, generation), json.dumps(record))
    with Asks(store, name, ranks, rank, process_token()) as asks:
        keys = {r: _key(r, generation) for r in range(size)}
        records = _collect(scoped, name, keys, deadline, timeout_s, asks)
    try:
        members = [Member.model_validate_json(json.dumps(records[r]["member"])) for r in range(size)]
        session = str(records[0]["session"])
    except (KeyError, ValueError) as error:
        raise WireError(f"group {name!r}: the store holds a malformed member record: {error}") from None
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(f"{session}\0{name}".encode())
    return Meeting(hasher.digest(16).hex(), members)


def _scoped(store: Store, ranks: Sequence[int]) -> Store:
    """The part of the store that belongs to one set of members."""
    if not ranks:
        return store
    members = ",".join(map(str, ranks))
    if len(members) > 60:
        members = blake3(members.encode()).hexdigest(16)
    return PrefixStore(f"of {members}", store)


def _key(rank: int, generation: int) -> str:
    return f"rank/{rank}/{generation}"


def _claim(store: Store, name: str, rank: int) -> int:
    """Take ``rank``; return 1, or more where this same process had it in an earlier group of that name."""
    claim = f"claim/{rank}"
    generation = int(store.add(claim, 1))
    if generation == 1:
        return generation
    key = _key(rank, generation - 1)
    first: dict[str, object] = {}
    if _wait(store, [key], CLAIM_S):
        try:
            record = json.loads(store.get(key))
            if record["token"] == process_token():
                return generation
            first = record["member"]
        except (ValueError, KeyError):
            pass
    store.add(claim, -1)
    raise DuplicateIdentity(_taken(name, rank, first))


def _taken(name: str, rank: int, first: dict[str, object]) -> str:
    """Say who has the rank, and what to do if that is only a leftover."""
    here = f"process {os.getpid()} on host {socket.gethostname()}"
    if not first:
        return (
            f"rank {rank} of group {name!r} has been claimed by another process, and {here} claims it too; "
            "give each process its own rank, or delete the store's file if it is left from an earlier run"
        )
    pid, host = first.get("pid"), first.get("host")
    text = f"rank {rank} of group {name!r} belongs to process {pid} on host {host}; {here} claims it too"
    if host == socket.gethostname() and isinstance(pid, int) and not os.path.exists(f"/proc/{pid}"):
        return (
            f"{text}. That process no longer runs: the store is left from an earlier run; delete its file "
            "(file://), or use another port (tcp://)"
        )
    return f"{text}. Give each process its own rank (RANK, or the rank argument)"


def _collect(
    store: Store, name: str, keys: dict[int, str], deadline: float, timeout_s: float, asks: Asks
) -> dict[int, dict[str, object]]:
    """Read every rank's record, reporting who is missing while some are."""
    records: dict[int, dict[str, object]] = {}
    missing = dict(keys)
    report = time.monotonic() + REPORT_S
    while missing:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"group {name!r} of {len(keys)} ranks was not complete after {timeout_s:g} s (timeout): "
                f"missing {_ranks(missing)}; each must call init_process_group (or new_group) with this "
                f"store, and reach it{asks.others(missing)}"
            )
        here = list(missing)
        if not _wait(store, list(missing.values()), max(0.05, min(LOOK_S, left))):
            here = [rank for rank, key in missing.items() if store.check([key])]
        for rank in here:
            records[rank] = json.loads(store.get(missing.pop(rank)))
        if missing and time.monotonic() >= report:
            report = time.monotonic() + REPORT_S
            logger.warning(
                "group %r: waiting for %s (%d of %d are here)",
                name, _ranks(missing), len(records), len(keys),
            )  # fmt: skip
            asks.look(missing)
    return records


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait for all ``keys``; False when time runs out."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        # A TCPStore raises DistStoreError, a FileStore a plain RuntimeError; a lost store something else.
        if isinstance(error, DistStoreError) or "timeout" in str(error).lower():
            return False
        raise
    return True


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 2, 3``; long lists are cut."""
    numbers = sorted(ranks)
    text = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"
