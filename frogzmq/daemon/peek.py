"""What a peer says about itself when asked: the core's state and what only the process knows."""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import Any

from frogzmq.daemon.driver import Driver
from frogzmq.proto.peer import PeerCore
from frogzmq.proto.report import receipts_of
from frogzmq.wire.messages import PROTOCOL

_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_facts() -> dict[str, Any]:
    """Memory, CPU, threads and descriptors of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm") as statm:
        fields = statm.read().split()
    return {
        "pid": os.getpid(),
        "rss_bytes": int(fields[1]) * _PAGE,
        "shared_bytes": int(fields[2]) * _PAGE,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "python": sys.version.split()[0],
    }


MAX_RECEIPT_BYTES = 8 << 20
"""About how much JSON one answer has; the oldest receipts are left off."""


def receipts_snapshot(core: PeerCore, gid: str) -> dict[str, Any]:
    """The receipts of one group (``gid`` in hex) or of all, oldest first; plain JSON values."""
    found: list[dict[str, Any]] = []
    left, left_off = MAX_RECEIPT_BYTES, 0
    for group in reversed(core.witnessed_groups()):
        if gid in ("", group.hex):
            rows = receipts_of(group)
            while rows and left > 0:
                found.append(rows.pop())
                left -= 600 + 80 * (len(found[-1]["parts"]) + len(found[-1]["got"]))
            left_off += len(rows)
    return {"me": core.me.model_dump(), "receipts": found[::-1], "left_off": left_off}


def snapshot(driver: Driver, started_at: float) -> dict[str, Any]:
    """Plain JSON values; ``started_at`` on the driver's clock."""
    now = driver.clock()
    workers = driver.workers
    return {
        "protocol": PROTOCOL,
        "me": driver.core.me.model_dump(),
        "uptime_s": now - started_at,
        "process": process_facts(),
        **driver.core.snapshot(now),
        "fabric": driver.fabric.snapshot(),
        "arena": driver.service.arena.usage(),
        "processes": driver.service.snapshot(),
        "workers": {"threads": workers.size, "waiting": workers.waiting, "tasks": workers.submitted},
        "plane": driver.plane.usage(),
        "open_ops": len(driver.ops),
    }
