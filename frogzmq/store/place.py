"""Directories that hold arena segments: private, checked, measured, and cleaned of what the dead left.

A place belongs to one living arena at a time (an advisory lock on the directory itself says which), so
segment files found in it at the start were left by a peer that died and are removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from frogzmq.errors import DuplicateIdentity, StoreFull

PREFIX = "arena."
"""Segment ``n`` is the file ``arena.<n>`` in one of the arena's directories."""
SHARED_MEMORY = Path("/dev/shm")
ROOM_SHARE = 0.75
"""How much of a place's free room an arena may use: the rest is for whoever else lives there."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h


def arena_directory(runtime_dir: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where the peer of ``runtime_dir`` keeps its first segments: the same on each start of it."""
    digest = hashlib.sha256(os.fsencode(runtime_dir.absolute())).hexdigest()[:16]
    return shared_memory / f"frogzmq-{os.getuid()}-{digest}"


class Place:
    """A directory for segments. ``open`` it before use; ``limit`` bounds what may be allocated in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments: list[int] = []
        self.limit = 0
        self._fd = -1

    @property
    def is_open(self) -> bool:
        """Whether ``open`` has succeeded."""
        return self._fd >= 0

    def open(self) -> None:
        """Make or adopt the directory, lock it, remove dead segments, set ``limit``.

        ``StoreFull`` where it cannot be used (missing parent, not ours, open to others), with the
        reason; ``DuplicateIdentity`` where a living arena holds it.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.directory, flags)
        except OSError as error:
            raise StoreFull(f"{self.directory} cannot hold shared memory: {error.strerror}") from None
        try:
            info = os.fstat(fd)
            if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
                raise StoreFull(
                    f"{self.directory} cannot hold shared memory: it must belong to user id {os.getuid()} "
                    f"with mode 0700, but belongs to {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}"
                )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DuplicateIdentity(
                    f"{self.directory} is in use by another living peer; stop it, or give this one "
                    "another FROGZMQ_RUNTIME_DIR"
                ) from None
            for path in self.directory.glob(PREFIX + "*"):
                with suppress(OSError):  # what cannot be removed is refused when its number is needed
                    path.unlink()
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.limit = int(self.free() * ROOM_SHARE)

    def free(self) -> int:
        """Bytes free there now; in memory file systems no more than the memory that is available."""
        try:
            room = os.statvfs(self.directory)
        except OSError:
            return 0
        free = room.f_bavail * room.f_frsize
        return min(free, available_memory()) if in_memory(self.directory) else free

    def close(self) -> None:
        """Give the directory up and remove it when it is empty; segments have been unlinked before."""
        if self._fd < 0:
            return
        with suppress(OSError):
            self.directory.rmdir()
        os.close(self._fd)
        self._fd = -1


def in_memory(path: Path) -> bool:
    """Whether ``path`` is on a file system that lives in memory; False where that cannot be told."""
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            if left.split()[2] == number:
                return right.split()[0] in ("tmpfs", "ramfs", "hugetlbfs")
    except (OSError, IndexError):
        pass
    return False


def available_memory() -> int:
    """Bytes that processes here can still allocate: the kernel's estimate, or the container's limit."""
    found = [1 << 62]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # cgroup v2; the file says "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(max(0, limit - int((group / "memory.current").read_text())))
    return min(found)


def allocate(fd: int, off: int, size: int) -> None:
    """Have the file system give these bytes: ``OSError`` now instead of a bus error at a later write."""
    os.posix_fallocate(fd, off, size)


def give_back(fd: int, off: int, size: int) -> bool:
    """Punch a hole: the bytes read as zeros and cost nothing. False where the file system cannot."""
    return _FALLOCATE is not None and _FALLOCATE(fd, _KEEP_SIZE_AND_PUNCH, off, size) == 0


def _load_fallocate() -> Callable[..., int] | None:
    # The standard library has posix_fallocate only, which cannot punch holes.
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    function.restype = ctypes.c_int
    return function


_FALLOCATE = _load_fallocate()
