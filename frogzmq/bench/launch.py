"""Starts ranks on this machine, in as many runtime directories as there shall be machines, and cleans up.

A runtime directory makes a machine: ranks that share one share a peer. Peers are started by the ranks
themselves and end with them; what is still there when a run ends, however it ends, is asked to stop, then
terminated, then killed, by pid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from frogzmq.bench.peers import PeerView, ask_peer, find_peer
from frogzmq.bench.probes import children_of
from frogzmq.bench.spec import Layout
from frogzmq.config import environment
from frogzmq.errors import FrogError

_GRACE_S = 3.0
_TAIL = 40
"""Lines of each rank's output that are kept for an error."""


class RankFailed(FrogError):
    """A rank ended with an error; the text holds the end of what it printed."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """The rank processes of one run; a context manager that leaves nothing behind.

    ``command``: what every rank runs. ``on_line(rank, line)`` is called, from a thread, for every line that
    a rank prints to stdout or stderr.
    """

    def __init__(
        self,
        layout: Layout,
        command: Sequence[str],
        *,
        on_line: Callable[[int, str], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.layout = layout
        self.command = list(command)
        # Short: the path of a unix socket holds 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="frogzmq-"))
        self.runtime_dirs = [self.folder / f"machine-{host}" for host in range(layout.peers)]
        self.processes: list[subprocess.Popen[str]] = []
        self._on_line = on_line
        self._env = dict(env or {})
        self._tails: list[list[str]] = [[] for _ in range(layout.ranks)]
        self._readers: list[threading.Thread] = []
        self._peer_pids: set[int] = set()

    def __enter__(self) -> Ranks:
        port = str(free_port())
        for path in self.runtime_dirs:
            path.mkdir(mode=0o700)
        try:
            for rank in range(self.layout.ranks):
                self._start(rank, port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int, port: str) -> None:
        host = self.layout.host_of(rank)
        local = self.layout.ranks_of(host)
        env = dict(environment())
        for name in [n for n in env if n.startswith(("TORCHELASTIC_", "PMI_"))]:
            del env[name]
        env |= {
            "RANK": str(rank), "WORLD_SIZE": str(self.layout.ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "LOCAL_RANK": str(local.index(rank)), "LOCAL_WORLD_SIZE": str(len(local)),
            "FROGZMQ_RUNTIME_DIR": str(self.runtime_dirs[host]), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
        } | self._env  # fmt: skip
        # A session of its own: Ctrl-C reaches this process, which then ends the ranks in order.
        process = subprocess.Popen(
            self.command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        tail = self._tails[rank]
        for line in process.stdout:
            tail.append(line.rstrip("\n"))
            del tail[:-_TAIL]
            if self._on_line is not None:
                self._on_line(rank, line.rstrip("\n"))

    def peers(self) -> list[tuple[int, PeerView]]:
        """The peers that answer now, with the machines that they serve."""
        views = [(host, find_peer(path)) for host, path in enumerate(self.runtime_dirs)]
        found = [(host, view) for host, view in views if view is not None]
        self._peer_pids.update(view.pid for _, view in found)
        return found

    def wait(self, deadline_s: float, poll: Callable[[], None] | None = None, every_s: float = 0.1) -> None:
        """Wait until every rank has ended well, calling ``poll`` meanwhile; ``RankFailed`` otherwise."""
        until = time.monotonic() + deadline_s
        while True:
            codes = [process.poll() for process in self.processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    raise RankFailed(self._describe(rank, f"ended with {_exit_text(code)}"))
            if all(code == 0 for code in codes):
                self._join_readers()
                return
            if time.monotonic() > until:
                rank = codes.index(None)
                raise RankFailed(self._describe(rank, f"has not ended after {deadline_s:.0f} s"))
            if poll is not None:
                poll()
            time.sleep(every_s)

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(1.0)

    def _describe(self, rank: int, what: str) -> str:
        time.sleep(0.3)  # let the others print why
        lines = [f"rank {rank} of {self.layout.describe()} {what}"]
        for index, tail in enumerate(self._tails):
            if tail:
                lines += [f"--- rank {index} printed last:", *tail]
        return "\n".join(lines)

    def close(self) -> None:
        """End every process of the run and remove its files."""
        with _undisturbed():
            self.peers()
            running = [process.pid for process in self.processes if process.poll() is None]
            # A peer that is still starting answers nobody, but it is somebody's child.
            self._peer_pids.update(child for pid in running for child in children_of(pid))
            _end(running, self.processes)
            self._stop_peers()
            self._join_readers()
            for process in self.processes:
                if process.stdout is not None:
                    process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stop_peers(self) -> None:
        for path in self.runtime_dirs:
            ask_peer(path, stop=True)
        until = time.monotonic() + _GRACE_S
        while any(_alive(pid) for pid in self._peer_pids) and time.monotonic() < until:
            time.sleep(0.05)
        _end([pid for pid in self._peer_pids if _alive(pid)], [])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM: cleaning up takes seconds and must be finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _alive(pid: int) -> bool:
    """Whether the process runs (one that has ended and waits for its parent does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _end(pids: Sequence[int], owned: Sequence[subprocess.Popen[str]]) -> None:
    """Ask with SIGTERM, insist with SIGKILL after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            if _alive(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        until = time.monotonic() + _GRACE_S
        while any(_alive(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.02)
    for process in owned:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit status {code}"


def python() -> str:
    """The interpreter that runs this."""
    return sys.executable
