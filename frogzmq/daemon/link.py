"""Our own connection to another peer's endpoint: DEALERs that we dialled, and news of their state."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

import zmq

from frogzmq.wire import limits

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]

_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip
_FAILURES: dict[int, str] = {
    int(zmq.EVENT_DISCONNECTED): "connection lost",
    int(zmq.EVENT_CONNECT_RETRIED): "cannot connect",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "our key is not allowed there (frogzmq allow)",
    int(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    ): "no common encryption: it is on at one end and off at the other",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake failed: not a peer, or it has another key",
}
_EVENT = struct.Struct("=hi")

PROBE_S = 0.002
"""Long enough for a refusal from this machine or its LAN; the loop stands still meanwhile."""
CONTROL_HWM = 20_000
BULK_HWM = 4_096


@dataclass(frozen=True, slots=True)
class Caller:
    """Who we are on a connection: name of the route and, where it is encrypted, our key pair (Z85)."""

    peer: str
    instance: str
    public: bytes
    secret: bytes


def bounded(sock: ZmqSocket, hwm: int) -> ZmqSocket:
    """Apply the bounds that every fabric socket has."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.RCVHWM, hwm)
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
    return sock


def encrypt_client(sock: ZmqSocket, caller: Caller, key: str) -> None:
    """Make the next ``connect`` of ``sock`` talk CURVE to the holder of ``key``; plain if that is empty."""
    if key:
        sock.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        sock.setsockopt(zmq.CURVE_PUBLICKEY, caller.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, caller.secret)


def _why(endpoint: str) -> str:
    """Why a connection cannot be made, which libzmq does not tell; takes ``PROBE_S`` at most."""
    text = _FAILURES[int(zmq.EVENT_CONNECT_RETRIED)]
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            code = probe.connect_ex((host.strip("[]"), int(port)))
            if code == errno.EINPROGRESS:
                select.select([], [probe], [], PROBE_S)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except (OSError, ValueError) as error:
        return f"{text}: {error}"
    if code == errno.ECONNREFUSED:
        return f"{text}: connection refused, nobody listens there"
    return f"{text}: {os.strerror(code)}" if code else text


class Link:
    """One control DEALER with a monitor, and bulk DEALERs that live while the control one is up."""

    def __init__(self, context: ZmqContext, caller: Caller, endpoint: str, key: str, lanes: int) -> None:
        self.endpoint, self.key = endpoint, key
        self.up: bool | None = None
        self.instance = ""
        self._reason = ""
        self.messages_out = self.bytes_out = 0
        self._context, self._caller, self._lanes = context, caller, lanes
        self._next = 0
        self.bulk: list[ZmqSocket] = []
        # IMMEDIATE: nothing is queued for a connection that is down, so nothing stale arrives later.
        self.control = self._dealer("c", CONTROL_HWM)
        self.control.setsockopt(zmq.IMMEDIATE, 1)
        self.monitor: ZmqSocket = self.control.get_monitor_socket(_MONITORED)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.control.connect(endpoint)

    def _dealer(self, lane: str, hwm: int) -> ZmqSocket:
        caller = self._caller
        sock = bounded(self._context.socket(zmq.DEALER), hwm)
        sock.setsockopt(zmq.IDENTITY, f"{caller.peer}:{caller.instance}:{lane}".encode())
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        encrypt_client(sock, caller, self.key)
        return sock

    def news(self) -> list[tuple[bool, str]]:
        """Changes of state since the last call: (up, reason)."""
        changes: list[tuple[bool, str]] = []
        while True:
            try:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return changes
            code = int(_EVENT.unpack(frames[0])[0]) if len(frames[0]) == _EVENT.size else 0
            if code == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._raise()
                changes.append((True, ""))
                self._reason = ""
            elif code in _FAILURES:
                retried = code == zmq.EVENT_CONNECT_RETRIED
                reason = _why(self.endpoint) if retried else _FAILURES[code]
                worse = code != zmq.EVENT_DISCONNECTED and reason != self._reason
                if self.up is not False or worse:
                    self._lower()
                    self._reason = reason
                    changes.append((False, reason))

    def _raise(self) -> None:
        self.up = True
        self._drop_bulk()
        for number in range(self._lanes):
            sock = self._dealer(f"b{number}", BULK_HWM)
            sock.connect(self.endpoint)
            self.bulk.append(sock)

    def _lower(self) -> None:
        self.up = False
        self._drop_bulk()

    def _drop_bulk(self) -> None:
        # What waits in these queues may point at arena bytes that will be reused: it goes with them.
        for sock in self.bulk:
            sock.close(0)
        self.bulk.clear()

    def next_bulk(self) -> ZmqSocket:
        """The bulk lane whose turn it is; the control lane while there is none."""
        if not self.bulk:
            return self.control
        self._next = (self._next + 1) % len(self.bulk)
        return self.bulk[self._next]

    def close(self) -> None:
        """Drop the connection and whatever is queued on it."""
        self._drop_bulk()
        self.control.disable_monitor()
        self.monitor.close(0)
        self.control.close(0)
