"""What Linux says about processes and sockets: CPU time, private memory, bytes sent over TCP."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_SENT, _RESENT, _INFO_BYTES = 200, 208, 216
"""Byte offsets of tcpi_bytes_sent and tcpi_bytes_retrans in struct tcp_info (Linux 4.19), and of the next."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads, also those that have ended; 0.0 when it is gone.

    Uses the process's own CPU clock: nanoseconds, where /proc/PID/stat counts ticks of 10 ms.
    """
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) computes: CPUCLOCK_SCHED of a process
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def private_bytes(pid: int) -> int:
    """Resident anonymous memory of a process: no mapped files, no arena; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def allocated_bytes(files: Iterable[str | Path]) -> int:
    """Memory or disk that files really occupy (an arena is sparse); files that are gone count nothing."""
    total = 0
    for path in files:
        try:
            total += os.stat(path).st_blocks * 512
        except OSError:
            continue
    return total


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except (OSError, ValueError):
        pass
    return found


def tcp_sockets() -> list[tuple[int, int, int]]:
    """This process's connected TCP sockets: (local port, remote port, bytes sent once)."""
    rows: list[tuple[int, int, int]] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            probe = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with probe:
            try:
                if probe.family not in (socket.AF_INET, socket.AF_INET6) or probe.type != socket.SOCK_STREAM:
                    continue
                local, remote = probe.getsockname()[1], probe.getpeername()[1]
                info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                continue
        if len(info) >= _INFO_BYTES:
            sent, again = struct.unpack_from("=QQ", info, _SENT)
            rows.append((local, remote, sent - again))
    return rows


def sent_to(ports: Mapping[int, int], host: int) -> int:
    """Bytes that this process has sent over TCP to processes of other machines than ``host``.

    ``ports``: local port of every socket of every rank -> the machine that it belongs to.
    """
    return sum(sent for _, remote, sent in tcp_sockets() if ports.get(remote, host) != host)


def arena_files(directories: Iterable[str]) -> list[Path]:
    """All segments that an arena now has in its directories."""
    return sorted(path for directory in directories for path in Path(directory).glob("arena.*"))
