"""A rank's view of the arena: the peer's segment files, each mapped whole and once."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from frogzmq.errors import PeerUnreachable, WireError
from frogzmq.store.place import PREFIX

Bytes: TypeAlias = npt.NDArray[np.uint8]

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): map pages writable in one call instead of one fault for each."""
_POPULATE_STEP = 4 << 20
"""Bytes mapped in at a time: the call holds the interpreter lock, about 1 ms each."""


class ArenaMap:
    """Turns (segment, offset, size) into arrays that share memory with the peer.

    ``paths`` come from the peer: segment files, or directories in which segments may appear later.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._directories: list[Path] = []
        for path in map(Path, paths):
            directory = path.parent if path.name.startswith(PREFIX) else path
            if directory not in self._directories:
                self._directories.append(directory)
        self._maps: dict[int, mmap.mmap] = {}
        self._bytes: dict[int, Bytes] = {}

    def view(self, seg: int, off: int, size: int) -> Bytes:
        """``size`` bytes at ``off`` of segment ``seg``, shared, writable.

        Only what the peer leased to this rank, or named in a result, may be touched. ``PeerUnreachable``
        where the segment cannot be mapped, ``WireError`` where the bytes are outside it.
        """
        whole = self._bytes.get(seg)
        if whole is None:
            whole = self._map(seg)
        if off < 0 or size < 0 or off + size > len(whole):
            raise WireError(f"segment {seg} has {len(whole)} bytes; {size} bytes at {off} are outside it")
        return whole[off : off + size]

    def populate(self, seg: int, off: int, size: int) -> None:
        """Map the pages of a leased extent now, so that the first copy into it takes no page faults.

        A help, not a duty: does nothing where the kernel does not know the call.
        """
        self.view(seg, off, size)
        start = off - off % mmap.PAGESIZE
        with suppress(OSError):
            while start < off + size:
                step = min(_POPULATE_STEP, off + size - start)
                self._maps[seg].madvise(_POPULATE_WRITE, start, step)
                start += step

    def close(self) -> None:
        """Forget all mappings; memory is unmapped when the last array that uses it goes."""
        self._bytes.clear()
        for mapped in self._maps.values():
            with suppress(BufferError):
                mapped.close()
        self._maps.clear()

    def _map(self, seg: int) -> Bytes:
        for directory in self._directories:
            path = directory / f"{PREFIX}{seg}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PeerUnreachable(
                    f"cannot map the peer's shared memory {path}: {error.strerror}"
                ) from None
            try:
                mapped = mmap.mmap(fd, 0)
            except (OSError, ValueError) as error:
                raise PeerUnreachable(f"cannot map the peer's shared memory {path}: {error}") from None
            finally:
                os.close(fd)
            self._maps[seg] = mapped
            self._bytes[seg] = np.frombuffer(mapped, np.uint8)
            return self._bytes[seg]
        where = ", ".join(map(str, self._directories)) or "no directory"
        raise PeerUnreachable(
            f"the peer's shared memory segment {seg} is not in {where}: the peer is gone, or this process "
            "does not see the same files (a container needs the peer's directories mounted)"
        )
