"""How a rank ends: whatever the way, its peer hears why before any other exit handler can hang.

* an uncaught exception: BYE with its name and text, from ``sys.excepthook``;
* a normal end without ``destroy_process_group``: BYE, clean;
* the launcher (torchrun) dies: BYE, then this process ends too, so that no worker stays behind.

In a forked child nothing here does anything.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from frogzmq.config import environment

if TYPE_CHECKING:
    from frogzmq.client.client import Client

logger = logging.getLogger("frogzmq")

TERMINATE_S = 3.0
"""Between asking this process to end (SIGTERM) and ending it, after its launcher has died."""

_clients: list[Client] = []
_pid = os.getpid()
_lock = threading.Lock()
_installed = False
_previous_hook = sys.excepthook
_watch: LauncherWatch | None = None


def process() -> int:
    """This process's number, without asking the kernel (1 us): noted anew in every forked child."""
    return _pid


def _after_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def add(client: Client, env: Mapping[str, str] | None) -> None:
    """Look after ``client`` until ``remove``."""
    global _watch
    with _lock:
        _clients.append(client)
        _install()
        if _watch is None and environment(env).get("TORCHELASTIC_RUN_ID"):
            _watch = LauncherWatch(os.getppid())


def remove(client: Client) -> None:
    """Forget ``client``; the launcher is no longer watched when it was the last."""
    global _watch
    with _lock:
        if client in _clients:
            _clients.remove(client)
        watch = _watch
        if _clients or watch is None:
            return
        _watch = None
    watch.stop()


def reason_of(error: BaseException) -> str:
    """One line that tells other ranks why this one stopped."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _install() -> None:
    global _installed, _previous_hook
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        _previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for client in tuple(_clients):
        client.goodbye(False, reason_of(error))
    _previous_hook(kind, error, trace)


def _at_exit() -> None:
    for client in tuple(_clients):
        client.close(True, "exited")


class LauncherWatch:
    """A thread that waits for the launcher's death; a process that ends cannot be waited for by number,
    so its pidfd is polled (and the parent's number, where the kernel has none)."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._pid = os.getpid()
        try:
            self._pidfd = os.pidfd_open(parent)
        except OSError:
            self._pidfd = -1
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="frogzmq-launcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if os.getpid() != self._pid or self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")  # closing would not do: a forked child may hold its copy open
        os.close(self._wake_write)
        self._wake_write = -1
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN | select.POLLHUP)
        if self._pidfd >= 0:
            poller.register(self._pidfd, select.POLLIN)
        while os.getppid() == self._parent:
            if any(fd == self._wake_read for fd, _ in poller.poll(2000)):
                break
        else:
            _end_orphan(self._parent)
        for fd in (self._wake_read, self._pidfd):
            if fd >= 0:
                os.close(fd)


def _end_orphan(parent: int) -> None:
    """The launcher is gone: say so, ask this process to end, and make it."""
    logger.error("the launcher (process %d) has died; this rank ends", parent)
    for client in tuple(_clients):
        client.goodbye(False, f"its launcher (process {parent}) died")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os._exit(1)
