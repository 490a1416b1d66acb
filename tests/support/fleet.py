"""Starts real peers, each in a runtime directory of its own, and sees to it that nothing is left of them."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from support.local import Local

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
STOP_S = 10.0


@dataclass
class PeerProcess:
    """One started peer."""

    process: subprocess.Popen[bytes]
    runtime_dir: Path
    log: Path
    opened: list[Local] = field(default_factory=list)

    @property
    def socket_path(self) -> Path:
        """The machine-local socket."""
        return self.runtime_dir / "peer.sock"

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def answers(self) -> bool:
        """Whether the local socket accepts connections."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            try:
                sock.connect(os.fspath(self.socket_path))
            except OSError:
                return False
            return True

    def wait_ready(self) -> PeerProcess:
        """Return once the local socket accepts; ``AssertionError`` with the log where it never does."""
        until = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None, (
                f"the peer ended with {self.process.returncode}\n{self.text()}"
            )
            assert time.monotonic() < until, f"the peer is not ready\n{self.text()}"
            time.sleep(0.01)
        return self

    def local(self, *, torch: str = "", hello: bool = True) -> Local:
        """A raw connection to the local socket, greeted unless told otherwise; closed with the fleet."""
        local = Local(self.socket_path, torch=torch, hello=hello)
        self.opened.append(local)
        return local

    def peek(self) -> dict[str, Any]:
        """The peer's snapshot."""
        with self.local() as local:
            return local.peek()

    def wait_for(self, what: Any, seconds: float = 15.0) -> dict[str, Any]:
        """Peek until ``what(snapshot)`` is true, and return that snapshot."""
        until = time.monotonic() + seconds
        while True:
            snapshot = self.peek()
            if what(snapshot):
                return snapshot
            assert time.monotonic() < until, f"never came true; last snapshot {snapshot}\n{self.text()}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = STOP_S) -> int:
        """Wait for the end by itself; returns the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"peer {self.pid} did not end in {seconds} s\n{self.text()}") from None

    def text(self) -> str:
        """Everything that it wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def shared_memory(self) -> Path:
        """Where its arena stands."""
        name = hashlib.sha256(os.fsencode(self.runtime_dir.resolve())).hexdigest()[:12]
        return Path("/dev/shm") / f"frogzmq-{os.getuid()}-{name}"


class Fleet:
    """Peers below ``folder``; a context manager that ends them all and checks that nothing stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[PeerProcess] = []

    def start(
        self,
        *,
        name: str = "",
        config: str = "",
        ephemeral: bool = False,
        env: Mapping[str, str] | None = None,
        runtime_dir: Path | None = None,
        ready: bool = True,
        before: str = "pass",
    ) -> PeerProcess:
        """Start a peer; ``config`` is the text of its TOML file. ``ready``: wait until it accepts ranks.

        ``before``: Python statements that run before the peer's modules are loaded.
        """
        number = len(self.peers)
        directory = runtime_dir or self.folder / f"m{number}"
        directory.mkdir(mode=0o700, exist_ok=True)
        settings = self.folder / f"m{number}.toml"
        settings.write_text(f'name = "{name or f"machine{number}"}"\n{config}\n')
        log = self.folder / f"m{number}.log"
        code = f"{before}\nimport sys\nfrom frogzmq.daemon.main import main\nsys.exit(main())"
        how = ["-m", "frogzmq.daemon"] if before == "pass" else ["-c", code]
        command = [sys.executable, "-P", *how, "--config", os.fspath(settings)]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command + ["--ephemeral"] * ephemeral,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(directory) | dict(env or {}),
                cwd=self.folder,
            )
        peer = PeerProcess(process, directory, log)
        self.peers.append(peer)
        return peer.wait_ready() if ready else peer

    def logs(self) -> str:
        """What all peers wrote, for messages of failing tests."""
        return "\n".join(f"--- {peer.log.name} (pid {peer.pid})\n{peer.text()}" for peer in self.peers)

    def close(self) -> None:
        """End every peer; ``AssertionError`` where one does not end, or something is left of it."""
        print(self.logs())  # shown by pytest where the test failed
        stuck = []
        for peer in self.peers:
            for local in peer.opened:
                local.close()
            if peer.process.poll() is None:
                peer.process.terminate()
        for peer in self.peers:
            try:
                peer.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()
                stuck.append(peer.pid)
        left = [peer.shared_memory for peer in self.peers if peer.shared_memory.exists()]
        killed = [peer for peer in self.peers if peer.process.returncode == -signal.SIGKILL]
        for peer in killed:  # nobody could clean up after those
            for path in sorted(peer.shared_memory.glob("*")) if peer.shared_memory.exists() else []:
                path.unlink()
            if peer.shared_memory.exists():
                peer.shared_memory.rmdir()
        allowed = {peer.shared_memory for peer in killed}
        assert not stuck, f"peers {stuck} did not end on SIGTERM"
        assert not [path for path in left if path not in allowed], f"shared memory is left: {left}"

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment(directory: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("FROGZMQ_")}
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{before}" if before else os.fspath(ROOT)
    env["FROGZMQ_RUNTIME_DIR"] = os.fspath(directory)
    return env
