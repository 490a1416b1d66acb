"""One living peer per runtime directory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from frogzmq.errors import DuplicateIdentity

LOCK_NAME = "peer.lock"
PATIENCE_S = 1.0
HANDOVER_S = 6.0
"""Patience of a peer that a rank starts: the rank has found that the last one does not listen any more."""


class PeerLock:
    """Held as long as the process lives, whatever ends it.

    ``DuplicateIdentity``, naming the process, where another one holds it for longer than a moment (one
    that is just stopping gets that moment).
    """

    def __init__(self, directory: Path, patience_s: float = PATIENCE_S) -> None:
        self.path = directory / LOCK_NAME
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(self._fd)
                    raise DuplicateIdentity(
                        f"a peer runs already in {directory}: process {holder}; stop it, or set "
                        "FROGZMQ_RUNTIME_DIR to another folder for a second one"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another peer start; the file stays, so that no two lock different ones."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
