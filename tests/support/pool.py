"""A pool of rank processes and peers that live as long as the test session.

Importing torch costs seconds, so one server imports it and forks the ranks (``support.rankserver``), and a
rank runs one job after the other: each job is a fresh ``init_process_group`` in any placement on up to
``MACHINES`` machines, that is, peers in runtime folders of their own. Whatever fails is replaced.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.fleet import Fleet
from support.rankserver import receive, send

ROOT = Path(__file__).resolve().parents[2]
MACHINES = 3
DEADLINE_S = 60.0


class Rank:
    """One forked process."""

    def __init__(self, control: socket.socket, log: Path) -> None:
        self.log = log
        self.sock, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [json.dumps({"log": os.fspath(log)}).encode()], [theirs.fileno()])
        self.pid = int(control.recv(64))

    def kill(self) -> None:
        """End it whatever it does."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.sock.close()


class Pool:
    """``run`` jobs on it; ``close`` ends every process that it started."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="frp-"))
        self.fleet = Fleet(self.folder)
        self._ranks: list[Rank] = []
        self._count = itertools.count()
        env = {key: value for key, value in os.environ.items() if not key.startswith("FROGZMQ_")}
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(DEADLINE_S)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "support.rankserver"], stdin=theirs, env=env, cwd=self.folder
            )

    def machine(self, index: int) -> Path:
        """The runtime folder of a machine; its peer runs."""
        while len(self.fleet.peers) < MACHINES:
            self.fleet.start(ready=False)
        return self.fleet.peers[index].wait_ready().runtime_dir

    def run(
        self,
        function: Callable[..., Any],
        placement: Sequence[int],
        *args: object,
        options: object = None,
        backend: str = "frogzmq",
        init: bool = True,
        timeout_s: float = 30.0,
        deadline_s: float = DEADLINE_S,
    ) -> list[Any]:
        """Call ``function(rank, size, *args)`` on every rank; what each returned.

        ``placement[r]`` is the machine of rank r. The function is found by its name in its module.
        ``AssertionError`` with all tracebacks where a rank raises, dies or is not done in ``deadline_s``.
        """
        size = len(placement)
        number = next(self._count)
        while len(self._ranks) < size:
            self._ranks.append(Rank(self._control, self.folder / f"rank{next(self._count)}.log"))
        job = {
            "file": inspect.getfile(function), "name": function.__name__, "args": args, "size": size,
            "url": f"file://{self.folder}/store{number}" if init else "", "backend": backend,
            "options": options, "timeout_s": timeout_s,
        }  # fmt: skip
        ranks = self._ranks[:size]
        for index, rank in enumerate(ranks):
            send(rank.sock, {**job, "rank": index, "machine": os.fspath(self.machine(placement[index]))})
        values = self._collect(ranks, deadline_s)
        bad = {index: value for index, (good, value) in values.items() if not good}
        if bad:
            texts = [
                f"rank {index} of {size}: {text}{_tail(ranks[index].log)}" for index, text in bad.items()
            ]
            self._replace(ranks)
            raise AssertionError("\n".join([*texts, self.fleet.logs()[-4000:]]))
        return [values[index][1] for index in range(size)]

    def _collect(self, ranks: Sequence[Rank], deadline_s: float) -> dict[int, tuple[bool, Any]]:
        values: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + deadline_s
        waiting = {rank.sock: index for index, rank in enumerate(ranks)}
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
            if not readable:
                break
            for sock in readable:
                index = waiting.pop(sock)
                try:
                    values[index] = receive(sock)
                except (EOFError, ConnectionError):
                    values[index] = (False, "the process died")
        for index in waiting.values():
            values[index] = (False, f"not done after {deadline_s:g} s")
        return values

    def _replace(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.kill()
            self._ranks.remove(rank)

    def close(self) -> None:
        """End ranks, server and peers."""
        self._replace(list(self._ranks))
        self._control.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        try:
            self.fleet.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"\n--- its output\n{text[-3000:]}" if text else ""
