"""Runs torch's ``DistributedTest`` on ranks that are started once: see ``worker``."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
START_S = 120
TEST_S = 90
LATE_S = 20
"""How long the other ranks have after the first one failed."""


class Outcome(NamedTuple):
    """``pass`` where every rank passed, ``skip`` where one skipped and none failed, else ``fail``."""

    outcome: str
    text: str


class Suite:
    """``ranks`` processes that answer to the name ``backend`` (``frogzmq``, or ``gloo``).

    ``ours``: whether frogzmq is loaded, and stands behind the name if that is "gloo".
    """

    def __init__(self, ranks: int, backend: str, ours: bool) -> None:
        self.ranks, self.backend, self.ours = ranks, backend, ours
        self.processes: list[subprocess.Popen[bytes]] = []
        self.tests: list[str] = []
        self._buffers: list[bytes] = []

    def run(self, tests: Iterable[str] | None = None) -> dict[str, Outcome]:
        """Run the named tests, or all that there are."""
        self._start()
        try:
            return {name: self._run(name) for name in (self.tests if tests is None else tests)}
        finally:
            self._stop()

    # ------------------------------------------------------------------- processes
    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="frs-"))
        for name in ("barrier", "test_dir", "init_dir", "peer"):
            (self.folder / name).mkdir(mode=0o700)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("FROGZMQ_", "TORCH"))}
        env |= {
            "BACKEND": self.backend, "WORLD_SIZE": str(self.ranks), "TEMP_DIR": os.fspath(self.folder),
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "FROGZMQ_RUNTIME_DIR": os.fspath(self.folder / "peer"), "PYTHONPATH": os.fspath(ROOT),
        }  # fmt: skip
        argv = [sys.executable, os.fspath(WORKER)]
        self.processes = []
        with (self.folder / "log").open("wb") as log:
            for rank in range(self.ranks):
                command = [*argv, str(rank), os.fspath(self.folder), "frogzmq" if self.ours else ""]
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env
                    )
                )
        self._buffers = [b""] * self.ranks
        answers = self._answers(START_S)
        assert len(answers) == self.ranks, (self.folder / "log").read_text()[-4000:]
        self.tests = answers[0]["tests"]

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self.processes = []
        shutil.rmtree(self.folder, ignore_errors=True)

    # ----------------------------------------------------------------------- tests
    def _run(self, name: str) -> Outcome:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{name}\n".encode())
            process.stdin.flush()
        answers = self._answers(TEST_S)
        outcomes = [answer["outcome"] for answer in answers.values()]
        texts = [f"rank {rank}: {answer['text']}" for rank, answer in answers.items() if answer["text"]]
        if len(answers) < self.ranks:
            silent = [rank for rank in range(self.ranks) if rank not in answers]
            texts.append(f"ranks {silent} did not end\n" + (self.folder / "log").read_text()[-3000:])
            self._stop()
            self._start()
            return Outcome("fail", "\n".join(texts))
        outcome = "fail" if "fail" in outcomes else "skip" if "skip" in outcomes else "pass"
        return Outcome(outcome, "\n".join(texts))

    def _answers(self, seconds: float) -> dict[int, dict]:
        """One line of each rank; fewer where some do not answer in time, or soon after one that failed."""
        answers: dict[int, dict] = {}
        until = time.monotonic() + seconds
        waiting = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
            if not readable:
                break
            for stream in readable:
                assert stream is not None
                rank = waiting[stream]
                data = os.read(stream.fileno(), 1 << 16)
                if not data:
                    del waiting[stream]  # it died
                    until = min(until, time.monotonic() + LATE_S)
                    continue
                self._buffers[rank] += data
                line, newline, rest = self._buffers[rank].partition(b"\n")
                if newline:
                    self._buffers[rank] = rest
                    answers[rank] = json.loads(line)
                    del waiting[stream]
                    if answers[rank].get("outcome") == "fail":
                        until = min(until, time.monotonic() + LATE_S)
        return answers
