"""Ranks without torch, for tests of life and death: a client and numpy, in a thread of the test or a process.

A rank runs ``function(me, *args)`` with a ``LightRank``; in a process it is shipped as source, and may use
``np``, ``me`` and what it imports. It tells the test something with ``me.say``, and waits with ``me.pause``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from frogzmq.client import Client, GroupHandle, Op
from frogzmq.descriptor import Descriptor
from frogzmq.errors import FrogError
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire.messages import GroupOptions, Identity, JoinGroup, Member

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
Test = TypeVar("Test", bound=Callable[..., None])
END = "\0"
"""What a rank is taken to say at its end."""
BARRIER = Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,))


class LightRank:
    """Lives in the rank's process (or in a thread of the test): its number, its client and its groups."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank, self.size, self.gid, self.folder = (spec[k] for k in ("rank", "size", "gid", "folder"))
        self.members = [Member.model_validate(member) for member in spec["members"]]
        self.client = Client(self.folder)

    def join(
        self, name: str = "default", timeout_s: float = 1800.0, ranks: Sequence[int] = ()
    ) -> GroupHandle:
        """Join a group of ``ranks`` (default: all); the same ``name`` on all of them makes one group."""
        chosen = list(ranks) or list(range(self.size))
        gid = f"{self.gid[:16]}{abs(hash_text(name)) % (1 << 64):016x}"
        members = [self.members[r].model_copy(update={"rank": i}) for i, r in enumerate(chosen)]
        return self.client.join(
            JoinGroup(
                gid=gid, job=self.gid, name=name, rank=chosen.index(self.rank), size=len(chosen),
                timeout_s=timeout_s, options=GroupOptions(), members=members,
            )
        )  # fmt: skip

    def all_reduce(self, group: GroupHandle, data: np.ndarray) -> Op:
        """Post an in-place SUM of ``data``."""
        descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, data.dtype.name, data.shape)
        flat = data.reshape(-1).view(np.uint8)
        return group.post(descriptor, flat, [flat])

    def barrier(self, group: GroupHandle) -> None:
        """Wait for all."""
        group.post(BARRIER, fence=True).wait()

    def say(self, text: str) -> None:
        """Tell the test."""
        print(text, flush=True)

    def pause(self) -> None:
        """Wait until the test says ``go`` (or for ever)."""
        sys.stdin.readline()

    def error_of(self, call: Callable[[], object]) -> tuple[str, str, float]:
        """Class and text of the ``FrogError`` that ``call`` raises, and the wall clock's time of it."""
        try:
            call()
        except FrogError as error:
            return type(error).__name__, str(error), time.time()
        raise AssertionError("no error was raised")


def hash_text(text: str) -> int:
    """A number that is the same in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


DRIVER = """
import json, pickle, sys
from typing import Any
import numpy as np
from support.light import LightRank
spec = json.loads(sys.stdin.readline())
scope = {"np": np, "Any": Any, "LightRank": LightRank}
exec(compile(spec["source"], "<rank>", "exec"), scope)
me = LightRank(spec)
value = scope[spec["name"]](me, *pickle.loads(bytes.fromhex(spec["args"])))
with open(spec["out"], "wb") as file:
    pickle.dump(value, file)
"""


class _Told:
    """Lines that a rank says, as the test reads them."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()

    @property
    def stderr(self) -> str:
        """What the rank wrote."""
        return ""

    def expect(self, text: str, seconds: float = 30.0) -> None:
        """Wait until the rank says a line that begins with ``text``."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"rank never said {text!r}\n{self.stderr}") from None
            assert line != END, f"the rank ended before it said {text!r}\n{self.stderr}"
            if line.startswith(text):
                return


class LightProcess(_Told):
    """The test's side of a rank that is a process."""

    def __init__(self, out: Path, folder: Path) -> None:
        super().__init__()
        self.out, self.folder = out, folder
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("FROGZMQ_")},
            "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}",
            "FROGZMQ_RUNTIME_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with open(f"{out}.stderr", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd=out.parent,
            )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.decode().rstrip("\n"))
        self.lines.put(END)

    def begin(self, function: Callable[..., Any], args: tuple[object, ...], spec: dict[str, Any]) -> None:
        """Tell the rank who it is: from now on it runs."""
        source = textwrap.dedent(inspect.getsource(function))
        shipped = {"source": source, "name": function.__name__, "args": pickle.dumps(args).hex()}
        self._write(json.dumps(spec | shipped | {"out": str(self.out)}))

    def go(self) -> None:
        """End the rank's ``pause``."""
        self._write("go")

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; returns the wall clock's time of it."""
        at = time.time()
        self.process.send_signal(number)
        return at

    def finish(self, seconds: float = 30.0) -> Any:
        """What the function returned; fails where the rank did, or did not end."""
        code = self.code(seconds)
        assert code == 0, f"the rank ended with {code}\n{self.stderr}"
        return pickle.loads(self.out.read_bytes())

    def code(self, seconds: float = 30.0) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the rank did not end in {seconds} s\n{self.stderr}") from None

    @property
    def stderr(self) -> str:
        """What the rank wrote."""
        return Path(f"{self.out}.stderr").read_text(errors="replace")

    def close(self) -> None:
        """Kill it if it lives, and let go of its pipes."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class LightThread(_Told, LightRank):
    """A rank that is a thread of the test, with a connection of its own."""

    def __init__(self, folder: Path) -> None:
        _Told.__init__(self)
        self.folder, self.pid = folder, os.getpid()
        self._go = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def begin(self, function: Callable[..., Any], args: tuple[object, ...], spec: dict[str, Any]) -> None:
        """Run ``function`` from now on."""
        LightRank.__init__(self, spec)
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        try:
            self._value = function(self, *args)
        except BaseException as error:
            self._error = error
        self.lines.put(END)

    @property
    def stderr(self) -> str:
        """The error that ended the thread."""
        return repr(self._error)

    def say(self, text: str) -> None:
        """Tell the test."""
        self.lines.put(text)

    def pause(self) -> None:
        """Wait until the test says ``go``."""
        assert self._go.wait(60)
        self._go.clear()

    def go(self) -> None:
        """End the ``pause``."""
        self._go.set()

    def finish(self, seconds: float = 30.0) -> Any:
        """What the function returned; raises what it raised."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"rank {self.rank} did not end in {seconds} s"
        if self._error is not None:
            raise self._error
        return self._value

    def close(self) -> None:
        """Say goodbye."""
        if hasattr(self, "client"):
            self.client.close()


class LightJob:
    """Starts ranks at peers that run already; a context manager that leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[LightProcess | LightThread] = []

    def start(
        self,
        function: Callable[..., Any],
        size: int,
        peers: Sequence[Any],
        *args: object,
        processes: Container[int] = (),
    ) -> list[Any]:
        """Rank i runs ``function`` at ``peers[i * len(peers) // size]`` (a started ``PeerProcess``).

        Ranks in ``processes`` are processes, the others threads of this one.
        """
        known = [Identity.model_validate(peer.peek()["me"]) for peer in peers]
        where = [i * len(peers) // size for i in range(size)]
        gid = secrets.token_hex(16)
        ranks: list[LightProcess | LightThread] = []
        for i in range(size):
            folder = peers[where[i]].runtime_dir
            out = self._folder / f"rank{i}.{gid[:8]}"
            ranks.append(LightProcess(out, folder) if i in processes else LightThread(folder))
            self._ranks.append(ranks[i])
        members = [
            Member(rank=i, pid=rank.pid, host=known[where[i]].name, who=known[where[i]]).model_dump(
                mode="json"
            )
            for i, rank in enumerate(ranks)
        ]
        for i, rank in enumerate(ranks):
            spec = {"rank": i, "size": size, "members": members, "gid": gid, "folder": str(rank.folder)}
            rank.begin(function, args, spec)
        return ranks

    def __enter__(self) -> LightJob:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.close()


def repeated(most: int, least: int = 1) -> Callable[[Test], Test]:
    """Run a test with ``run`` = 0, 1, ..: ``least`` times, or with ``--repeats`` as its case asks."""

    def mark(test: Test) -> Test:
        test.repeats = (least, most)  # type: ignore[attr-defined]
        return test

    return mark
