"""Containers give /dev/shm 64 MB or 16 MB: everything must still work, with one warning and no bus error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from frogzmq.store.arena import Arena
from frogzmq.store.map import ArenaMap
from frogzmq.store.place import arena_directory

shm, fallback, filled = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if filled:
    (shm / "other").write_bytes(bytes(filled))
warnings = []
arena = Arena(arena_directory(fallback, shm), fallback=fallback, warn=warnings.append)
ranks = [ArenaMap(arena.paths) for _ in range(2)]
size = 256 << 20
for step in range(3):
    extents = [arena.lease(f"rank{i}", size) for i in range(2)]
    for rank, extent in enumerate(extents):
        region = ranks[rank].view(*extent)
        region[:] = rank + step          # touches every page: a bus error would end this process
    total = arena.view(*extents[0])
    np.add(total, arena.view(*extents[1]), out=total)
    for rank in ranks:
        assert (rank.view(*extents[0])[::4096] == 1 + 2 * step).all()
    small = arena.lease("peer", 1 << 20)
    arena.view(*small)[:] = 1
    for extent in [*extents, small]:
        arena.release(extent)
if len(sys.argv) > 4:                    # somebody else fills the rest while the arena is in use
    with open(shm / "late", "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    blocks = [arena.lease("late", 1 << 20) for _ in range(12)]
    for block in blocks:
        arena.view(*block)[:] = 2
print(len(warnings), arena.usage()["places"], flush=True)
print(*warnings)
arena.close()
left = [p.name for p in shm.iterdir() if p.name.startswith("frogzmq")]
assert not left, left
"""


def can_mount() -> bool:
    if os.getuid() != 0 or not shutil.which("unshare"):
        return False
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"],
        check=False,
        capture_output=True,
        timeout=30,
    )
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    not can_mount(), reason="needs root and a private mount namespace (unshare -m)"
)


@pytest.mark.parametrize(
    ("size", "filled", "late"), [("64m", 0, ""), ("16m", 0, ""), ("16m", 16 << 20, ""), ("16m", 0, "late")]
)
def test_small_or_full_shared_memory(tmp_path: Path, size: str, filled: int, late: str) -> None:
    shm, fallback = tmp_path / "shm", tmp_path / "fallback"
    shm.mkdir()
    mounted = f'mount -t tmpfs -o size={size} tmpfs "{shm}" && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, "sh",
         sys.executable, "-c", SCRIPT, str(shm), str(fallback), str(filled), *([late] if late else [])],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    first, warning = done.stdout.splitlines()
    assert first.startswith("1 "), done.stdout
    assert str(shm) in warning
    assert str(fallback) in warning
    assert not fallback.exists(), "segments and their directory are removed at close"
