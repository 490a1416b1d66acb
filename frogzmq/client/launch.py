"""Find this machine's peer, or start one that ends with its last job.

Ranks of one machine start at the same time: whoever gets ``start.lock`` starts the peer, the others find it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import frogzmq
from frogzmq.config import SOCKET_NAME, environment
from frogzmq.errors import PeerUnreachable

START_S = 10.0
"""How long a started peer may take to open its socket (0.3 to 0.7 s on two shared cores)."""
LOG_LINES = 15
POLL_S = 0.01

_started: list[subprocess.Popen[bytes]] = []
"""Peers that this process has started: kept, so that Popen does not complain about a running child."""


def connect(folder: Path, env: Mapping[str, str] | None = None) -> socket.socket:
    """Return a connected socket to the peer of ``folder``; start the peer where none answers.

    ``PeerUnreachable`` quotes the last lines of the peer's log where it does not come up in ``START_S``.
    """
    path = folder / SOCKET_NAME
    sock = _try(path)
    if sock is not None:
        return sock
    deadline = time.monotonic() + START_S
    with _start_lock(folder, deadline):
        sock = _try(path)
        if sock is not None:
            return sock
        before = len(_started)
        try:
            # In a thread: an interrupt in the middle of Popen would leave a peer that nobody knows of.
            with ThreadPoolExecutor(1, "frogzmq-start") as apart:
                process = apart.submit(_spawn, folder, env).result()
            while time.monotonic() < deadline:
                sock = _try(path)
                if sock is not None:
                    return sock
                if process.poll() is not None:
                    break
                time.sleep(POLL_S)
        except BaseException:  # interrupted: nobody will come to that peer
            for process in _started[before:]:
                process.terminate()
            raise
    code = process.poll()
    what = f"ended at once with code {code}" if code is not None else f"opened no socket in {START_S:g} s"
    if code is None:
        process.terminate()
    raise PeerUnreachable(
        f"the peer that this rank started for {folder} {what}; its log {folder / 'peer.log'} ends:\n"
        f"{_last_lines(folder / 'peer.log')}"
    )


def _try(path: Path) -> socket.socket | None:
    """Connect to a peer that listens; None where there is none (no socket, or a dead one's)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(START_S)
        sock.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise PeerUnreachable(f"cannot connect to this machine's peer at {path}: {error.strerror}") from None
    return sock


@contextmanager
def _start_lock(folder: Path, deadline: float) -> Iterator[None]:
    """Hold ``start.lock``; the kernel frees it if the holder dies."""
    fd = os.open(folder / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise PeerUnreachable(
                        f"another process has been starting the peer of {folder} for {START_S:g} s; "
                        f"see {folder / 'peer.log'}"
                    ) from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def _spawn(folder: Path, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """Start ``python -m frogzmq.daemon --ephemeral``, in its own session: no signal of ours reaches it."""
    child_env = dict(environment(env))
    package = os.fspath(Path(frogzmq.__file__).resolve().parent.parent)
    before = child_env.get("PYTHONPATH")
    child_env["PYTHONPATH"] = f"{package}{os.pathsep}{before}" if before else package
    child_env["FROGZMQ_RUNTIME_DIR"] = os.fspath(folder)
    if child_env.get("FROGZMQ_CONFIG"):  # the peer runs in another folder, so a relative path would miss
        child_env["FROGZMQ_CONFIG"] = os.path.abspath(child_env["FROGZMQ_CONFIG"])
    with open(folder / "peer.log", "ab") as log:
        process = subprocess.Popen(
            # -P: a file named zmq.py or queue.py beside the user's script must not be imported.
            [sys.executable, "-P", "-m", "frogzmq.daemon", "--ephemeral"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=child_env,
            cwd="/",
        )
    _started.append(process)
    return process


def _last_lines(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"  (cannot be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (it is empty)"
