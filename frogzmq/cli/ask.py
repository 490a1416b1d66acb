"""One question to this machine's peer, through its local socket."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from typing import Any, TypeVar

import frogzmq
from frogzmq.config import SOCKET_NAME
from frogzmq.errors import DeadlineExceeded, PeerUnreachable, from_code
from frogzmq.wire import limits, messages, ranks

T = TypeVar("T", ranks.Welcome, ranks.Peeked)

ANSWER_S = 5.0
"""A peer answers within milliseconds; a machine under full load may need seconds."""
STOP_S = 10.0
"""A peer stops within 5 s; then its process must be gone."""


class Peer:
    """A connection to the peer that serves ``directory``; a context manager.

    ``PeerUnreachable`` where none runs there, ``VersionMismatch`` where it speaks another protocol,
    ``DeadlineExceeded`` where it does not answer.
    """

    def __init__(self, directory: Path, timeout_s: float = ANSWER_S) -> None:
        self.directory = directory
        self._timeout_s = timeout_s
        self._assembler = ranks.Assembler(ranks.FROM_PEER)
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._link.settimeout(timeout_s)
            self._connect()
            self.welcome = self._ask(_hello(), ranks.Welcome)
        except BaseException:
            self._link.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def snapshot(self) -> dict[str, Any]:
        """The peer's state as plain values."""
        return dict(self._ask(ranks.Peek(), ranks.Peeked).snapshot)

    def receipts(self) -> dict[str, Any]:
        """The receipts that the peer keeps: ``me``, ``receipts`` (oldest first) and ``left_off``."""
        return dict(self._ask(ranks.Peek(receipts=True), ranks.Peeked).snapshot)

    def stop(self) -> None:
        """Ask the peer to stop and wait until its process is gone."""
        self._send(ranks.Stop())
        until = time.monotonic() + STOP_S
        while _is_alive(self.welcome.pid):
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{self._who()} was asked to stop and still runs after {STOP_S:.0f} s; "
                    f"end it with: kill -9 {self.welcome.pid}"
                )
            time.sleep(0.02)

    def _who(self) -> str:
        return f"peer {self.welcome.who.name} (pid {self.welcome.pid})"

    def _connect(self) -> None:
        path = self.directory / SOCKET_NAME
        try:
            self._link.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise PeerUnreachable(
                f"no peer runs for {self.directory}; start one with `frogzmq peer`, or name the folder of a "
                "running one with --runtime-dir or FROGZMQ_RUNTIME_DIR"
            ) from None
        except OSError as error:
            raise PeerUnreachable(f"cannot reach the peer at {path}: {error.strerror or error}") from None

    def _send(self, message: ranks.Json) -> None:
        try:
            for datagram in ranks.encode_json(message):
                self._link.send(datagram)
        except OSError as error:
            raise PeerUnreachable(f"the peer of {self.directory} has gone: {error.strerror}") from None

    def _ask(self, message: ranks.Json, kind: type[T]) -> T:
        self._send(message)
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            answer = self._assembler.feed(self._receive())
            if isinstance(answer, kind):
                return answer
            if isinstance(answer, ranks.Error):
                raise from_code(answer.code, answer.text)
        raise self._silent()

    def _receive(self) -> bytes:
        try:
            datagram = self._link.recv(limits.DATAGRAM_BYTES + 1)
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            raise PeerUnreachable(f"the peer of {self.directory} has gone: {error.strerror}") from None
        if not datagram:
            raise PeerUnreachable(f"the peer of {self.directory} closed the connection: it stops")
        return datagram

    def _silent(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the peer of {self.directory} has not answered for {self._timeout_s:g} s: "
            "it is stopped (SIGSTOP), or its machine is overloaded"
        )


def _hello() -> ranks.Hello:
    return ranks.Hello(
        protocol=messages.PROTOCOL,
        pid=os.getpid(),
        version=frogzmq.__version__,
        torch="",
        python=platform.python_version(),
    )


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
