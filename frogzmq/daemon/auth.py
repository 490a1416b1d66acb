"""Who may connect to the encrypted listeners: a ZAP handler driven by the poll loop.

libzmq asks ``inproc://zeromq.zap.01`` about every CURVE handshake; until we answer, the caller's
messages reach nobody. Callers on the allow-list get their public key as ZMQ user id, which is how a
message's claimed sender is checked later.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

log = logging.getLogger("frogzmq.auth")

DOMAIN = b"frogzmq"
"""ZAP domain of our encrypted listeners; plain loopback listeners have none and are not asked about."""
_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_REMEMBERED = 256


class Gate:
    """Allow-list of public keys (Z85 text) and the socket on which libzmq asks about it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: set[str]) -> None:
        self.allowed = allowed
        self.denied = 0
        self._logged: set[str] = set()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def allow(self, key: str) -> None:
        """Let the holder of ``key`` in from now on (empty: a plain peer, nothing to do)."""
        if key:
            self.allowed.add(key)

    def drain(self) -> None:
        """Answer every waiting question."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        if len(frames) != 7 or frames[0] != b"1.0" or frames[5] != b"CURVE" or len(frames[6]) != 32:
            return [b"1.0", request, b"400", b"only CURVE is accepted here", b"", b""]
        key = z85.encode(frames[6]).decode()
        if frames[2] == DOMAIN and key in self.allowed:
            return [b"1.0", request, b"200", b"OK", key.encode(), b""]
        self.denied += 1
        if key not in self._logged and len(self._logged) < _MAX_REMEMBERED:
            self._logged.add(key)
            log.warning("refused a caller from %s: its key %s is not allowed here", frames[3].decode(), key)
        return [b"1.0", request, b"400", b"key is not allowed", b"", b""]
