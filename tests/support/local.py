"""A bare connection to a peer's local socket: sends any datagram, reads what comes back."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from frogzmq.descriptor import Descriptor
from frogzmq.wire import limits, ranks
from frogzmq.wire.messages import PROTOCOL, GroupOptions, Identity, Member

WAIT_S = 20.0


class Local:
    """Use as a context manager. ``torch``: what its Hello says (a rank's is not empty)."""

    def __init__(self, path: Path, *, torch: str = "", hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(os.fspath(path))
        self._assembler = ranks.Assembler(ranks.FROM_PEER)
        self.seen: list[ranks.Datagram] = []
        if hello:
            self.say(
                ranks.Hello(protocol=PROTOCOL, pid=os.getpid(), version="test", torch=torch, python="3.11")
            )
            self.welcome = self.expect(ranks.Welcome)

    def say(self, message: Any) -> None:
        """Send a JSON message."""
        for datagram in ranks.encode_json(message):
            self.sock.send(datagram)

    def send(self, datagram: bytes) -> None:
        """Send raw bytes as one datagram."""
        self.sock.send(datagram)

    def receive(self) -> ranks.Datagram | None:
        """The next message; None at the end of the connection."""
        while True:
            try:
                datagram = self.sock.recv(limits.DATAGRAM_BYTES + 1)
            except ConnectionResetError:
                return None
            if not datagram:
                return None
            message = self._assembler.feed(datagram)
            if message is not None:
                return message

    def expect(self, kind: type) -> Any:
        """Read until a message of ``kind`` comes; others are kept in ``seen``."""
        while True:
            message = self.receive()
            assert message is not None, f"the peer hung up before {kind.__name__}; it said {self.seen}"
            if isinstance(message, kind):
                return message
            self.seen.append(message)

    def ends(self) -> bool:
        """Read to the end of the connection."""
        while True:
            message = self.receive()
            if message is None:
                return True
            self.seen.append(message)

    def peek(self) -> dict[str, Any]:
        """The peer's snapshot."""
        self.say(ranks.Peek())
        snapshot: dict[str, Any] = self.expect(ranks.Peeked).snapshot
        return snapshot

    def join(
        self, rank: int, who: list[Identity], *, handle: int = 1, gid: str = "ab" * 16, pid: int = 0
    ) -> None:
        """Ask to be ``rank`` of a group whose rank i lives at ``who[i]``; the answer is not awaited."""
        members = [Member(rank=i, pid=pid or os.getpid(), host=w.name, who=w) for i, w in enumerate(who)]
        self.say(
            ranks.Join(
                handle=handle, gid=gid, job="test", name="default", rank=rank, size=len(who), timeout_s=30.0,
                options=GroupOptions(), members=members,
            )
        )  # fmt: skip

    def post(self, seq: int, descriptor: Descriptor, data: bytes, *, handle: int = 1) -> None:
        """Call an op with its bytes inline."""
        self.send(
            ranks.encode_post(handle, seq, ranks.INLINE, 0, 0, len(data), len(data), descriptor.encoded, data)
        )

    def close(self) -> None:
        """Hang up without a word, as a process that is killed does."""
        self.sock.close()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
