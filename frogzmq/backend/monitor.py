"""monitored_barrier: a barrier that says who did not come.

Every rank reports to rank 0 and waits for its answer, as in torch's Gloo backend, whose texts these are.
"""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np

from frogzmq.backend.errors import GroupBroken, surface
from frogzmq.client import GroupHandle
from frogzmq.errors import DeadlineExceeded
from frogzmq.errors import FrogError as PlainError

BARRIER_TAGS = (1 << 31) + (1 << 30)
COUNTED = (1 << 30) - 1
_NOTHING = np.empty(0, np.uint8)


def monitored_barrier(
    group: GroupHandle, number: int, timeout: timedelta | None, wait_all_ranks: bool
) -> None:
    """Return when all ranks have come. ``number`` counts the calls in this group.

    ``GroupBroken`` on rank 0 names those that did not come in time (``wait_all_ranks``: all of them, else the
    first); elsewhere it points to rank 0.
    """
    seconds = group.timeout_s if timeout is None else max(0.0, timeout.total_seconds())
    tag = BARRIER_TAGS + (number & COUNTED)
    if group.rank == 0:
        _collect(group, tag, seconds, wait_all_ranks)
    else:
        _report(group, tag, seconds)


def _collect(group: GroupHandle, tag: int, seconds: float, wait_all_ranks: bool) -> None:
    until = time.monotonic() + seconds
    letters = {r: group.mail.receive(r, tag, "uint8", [], seconds) for r in range(1, group.size)}
    missing: list[int] = []
    if seconds <= 0:
        raise GroupBroken("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms.")
    for rank, letter in letters.items():
        try:
            letter.wait(max(0.001, until - time.monotonic()))
        except DeadlineExceeded:
            missing.append(rank)
        except PlainError as error:
            missing.append(rank)
            if not wait_all_ranks:
                raise GroupBroken(f"[Rank 0]: {_failed([rank], seconds)}: {error}") from None
        if missing and not wait_all_ranks:
            break
    if missing:
        raise GroupBroken(f"[Rank 0]: {_failed(missing, seconds)}")
    for rank in letters:
        group.mail.send(rank, tag, "uint8", _NOTHING, seconds).wait()


def _failed(ranks: list[int], seconds: float) -> str:
    names = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
    return f"{names} failed to pass monitoredBarrier in {round(seconds * 1000)} ms"


def _report(group: GroupHandle, tag: int, seconds: float) -> None:
    try:
        group.mail.send(0, tag, "uint8", _NOTHING, seconds).wait()
        group.mail.receive(0, tag, "uint8", [], seconds).wait(seconds)
    except PlainError as error:
        raise GroupBroken(
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n"
            f"{surface(error)}"
        ) from None
