"""Asking a peer on this machine for its snapshot, through its local socket, as a command line tool does."""

from __future__ import annotations

import os
import platform
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frogzmq
from frogzmq.errors import WireError
from frogzmq.wire import limits, messages, ranks

SOCKET = "peer.sock"


@dataclass(frozen=True)
class PeerView:
    """One peer at one moment."""

    pid: int
    name: str
    arena: tuple[str, ...]
    """Directories of its arena."""
    snapshot: dict[str, Any]


def find_peer(runtime_dir: Path, deadline_s: float = 2.0) -> PeerView | None:
    """The snapshot of the peer that serves ``runtime_dir``; None where none answers in time."""
    return ask_peer(runtime_dir, deadline_s=deadline_s)


def ask_peer(runtime_dir: Path, *, stop: bool = False, deadline_s: float = 2.0) -> PeerView | None:
    """Say hello and peek (or ask the peer to stop); None where no peer answers in time."""
    until = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(deadline_s)
        try:
            link.connect(os.fspath(runtime_dir / SOCKET))
            hello = ranks.Hello(
                protocol=messages.PROTOCOL, pid=os.getpid(), version=frogzmq.__version__, torch="",
                python=platform.python_version(),
            )  # fmt: skip
            for message in (hello, ranks.Stop() if stop else ranks.Peek()):
                for datagram in ranks.encode_json(message):
                    link.send(datagram)
            return None if stop else _read(link, until)
        except (OSError, WireError):
            return None


def _read(link: socket.socket, until: float) -> PeerView | None:
    assembler = ranks.Assembler(ranks.FROM_PEER)
    welcome: ranks.Welcome | None = None
    while time.monotonic() < until:
        datagram = link.recv(limits.DATAGRAM_BYTES)
        if not datagram:
            return None
        message = assembler.feed(datagram)
        if isinstance(message, ranks.Welcome):
            welcome = message
        elif isinstance(message, ranks.Peeked) and welcome is not None:
            return PeerView(welcome.pid, welcome.who.name, tuple(welcome.arena), dict(message.snapshot))
        elif isinstance(message, ranks.Error):
            return None
    return None


def bytes_sent(view: PeerView) -> int:
    """Bytes that the peer has handed to its links to other machines so far, from its own counters."""
    fabric = view.snapshot.get("fabric")
    links = fabric.get("links") if isinstance(fabric, dict) else None
    if not isinstance(links, list):
        return 0
    return sum(int(link.get("bytes_sent", 0)) for link in links if isinstance(link, dict))
