"""Starts ranks as processes of their own and collects what they return.

A rank runs a function of the test file, shipped as source: it may use its arguments, what it imports
itself, and ``dist``, ``torch``, ``np``, ``os``, ``sys``, ``time``. It is called as
``function(rank, size, *args)`` after ``init_process_group`` (unless ``init`` is "none").
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import json, os, pickle, sys, time
spec = json.loads(sys.argv[1])
import numpy as np
import torch
import torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
import frogzmq
rank, size = spec["rank"], spec["size"]
if spec["url"]:
    dist.init_process_group(spec["backend"], init_method=spec["url"], rank=rank, world_size=size,
                            timeout=timedelta(seconds=spec["timeout_s"]))
scope = {"np": np, "torch": torch, "dist": dist, "os": os, "sys": sys, "time": time, "frogzmq": frogzmq,
         "timedelta": timedelta}
exec(compile(spec["source"], "<rank>", "exec"), scope)
value = scope[spec["name"]](rank, size, *pickle.loads(bytes.fromhex(spec["args"])))
with open(spec["out"], "wb") as file:
    pickle.dump(value, file)
if spec["destroy"] and dist.is_initialized():
    dist.destroy_process_group()
"""


@dataclass
class Rank:
    """One started rank; ``finish`` fills in the rest."""

    process: subprocess.Popen[bytes]
    out: Path
    code: int | None = None
    value: Any = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    """From the start of the last ``finish`` call until this rank was seen to have ended."""


class Ranks:
    """Ranks of one job. Use as a context manager: leftovers are killed at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.ranks: list[Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()

    def start(
        self,
        function: Callable[..., Any],
        size: int,
        machines: Sequence[Path],
        *args: object,
        url: str = "file",
        numbers: Sequence[int] | None = None,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        destroy: bool = True,
        backend: str = "frogzmq",
    ) -> None:
        """Start rank i on ``machines[i * len(machines) // size]`` (a runtime folder)."""
        if url == "file":
            url = f"file://{self.folder}/store"
        count = len(self.ranks)
        for index, number in enumerate(numbers if numbers is not None else range(size)):
            out = self.folder / f"out{count + index}"
            spec = {
                "rank": number, "size": size, "url": "" if url == "none" else url, "out": str(out),
                "source": textwrap.dedent(inspect.getsource(function)), "name": function.__name__,
                "args": pickle.dumps(args).hex(), "timeout_s": timeout_s, "destroy": destroy,
                "backend": backend,
            }  # fmt: skip
            machine = machines[number * len(machines) // size]
            child_env = {
                **os.environ,
                "PYTHONPATH": f"{ROOT}",
                "FROGZMQ_RUNTIME_DIR": str(machine),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            logs = [open(f"{out}.{name}", "wb") for name in ("stdout", "stderr")]  # noqa: SIM115
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, json.dumps(spec)],
                stdout=logs[0],
                stderr=logs[1],
                env=child_env,
                cwd=self.folder,
            )
            for log in logs:
                log.close()
            self.ranks.append(Rank(process, out))

    def finish(self, timeout_s: float = 90.0) -> list[Rank]:
        """Wait for all; a rank that does not end is made to show its stacks, killed, and has code None."""
        begin = time.monotonic()
        waiting = list(self.ranks)
        while waiting and time.monotonic() < begin + timeout_s:
            for rank in [r for r in waiting if r.process.poll() is not None]:
                waiting.remove(rank)
                rank.code = rank.process.returncode
                rank.seconds = time.monotonic() - begin
            time.sleep(0.02)
        for rank in waiting:
            rank.process.send_signal(signal.SIGKILL)
            rank.process.wait()
        for rank in self.ranks:
            rank.stdout = Path(f"{rank.out}.stdout").read_text(errors="replace")
            rank.stderr = Path(f"{rank.out}.stderr").read_text(errors="replace")
            if rank.out.exists():
                rank.value = pickle.loads(rank.out.read_bytes())
        return self.ranks


def run_ranks(
    folder: Path,
    function: Callable[..., Any],
    size: int,
    machines: Sequence[Path],
    *args: object,
    **options: Any,
) -> list[Any]:
    """Run one job to its end and return what each rank returned; fails where a rank did."""
    with Ranks(folder) as ranks:
        finish_s = options.pop("finish_s", 90.0)
        ranks.start(function, size, machines, *args, **options)
        done = ranks.finish(finish_s)
    bad = [f"rank {i}: code {r.code}\n{r.stdout}\n{r.stderr}" for i, r in enumerate(done) if r.code != 0]
    assert not bad, "\n".join(bad)
    return [r.value for r in done]


def machine_dirs(count: int) -> list[Path]:
    """Short private runtime folders (a unix socket's path is limited to 107 bytes); remove them yourself."""
    return [Path(tempfile.mkdtemp(prefix="frz-")) for _ in range(count)]
