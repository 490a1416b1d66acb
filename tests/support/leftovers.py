"""Looks for what a job has left: processes, shared memory, files, and bytes in a peer's arena."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PERSISTENT = {"start.lock", "peer.lock", "peer.log", "keys"}
"""Files of a runtime folder that outlive its peer."""


def living(folders: Iterable[Path]) -> list[int]:
    """Processes whose environment names one of the runtime folders: ranks, launchers, ephemeral peers."""
    marks = [f"FROGZMQ_RUNTIME_DIR={folder}".encode() for folder in folders]
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(mark in environ for mark in marks):
            found.append(int(entry))
    return found


def command(pid: int) -> str:
    """A process's command line, for messages."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"{pid} (gone)"
    return f"{pid}: {text[:200]}"


def wait_gone(folders: Iterable[Path], seconds: float, *, but: Iterable[int] = ()) -> float:
    """Wait until no process of the folders lives; returns how long it took."""
    folders, allowed, begin = list(folders), set(but), time.monotonic()
    while True:
        left = [pid for pid in living(folders) if pid not in allowed]
        waited = time.monotonic() - begin
        if not left:
            return waited
        assert waited < seconds, f"alive after {seconds} s: {[command(pid) for pid in left]}"
        time.sleep(0.05)


def shared_memory(folder: Path) -> Path:
    """Where the arena of a runtime folder stands."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    return Path("/dev/shm") / f"frogzmq-{os.getuid()}-{name}"


def nothing_left(folder: Path) -> None:
    """Fail where a peer that has ended left a socket, an arena or anything else behind."""
    assert not shared_memory(folder).exists()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files |= {path.name for path in folder.iterdir() if path.is_socket()}
    extra = {name for name in files if name.partition("/")[0] not in PERSISTENT}
    assert not extra, f"left in {folder}: {sorted(extra)}"


def is_idle(snapshot: dict[str, Any]) -> bool:
    """Whether a peer holds nothing of any job."""
    return (
        not snapshot["groups"]
        and snapshot["open_ops"] == 0
        and snapshot["plane"]["ops"] == 0
        and snapshot["plane"]["heap_bytes"] == 0
        and snapshot["plane"]["early_bytes"] == 0
        and snapshot["plane"]["reserved_bytes"] == 0
        and snapshot["arena"]["leased_bytes"] == 0
        and not any(process["rank"] for process in snapshot["processes"])
    )
