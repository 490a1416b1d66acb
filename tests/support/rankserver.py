"""The program behind ``support.pool``: imports torch once, then forks ranks, which run functions by name.

It is started with a socket as file descriptor 0. Every request carries the descriptor of the new rank's own
socket; the answer is the rank's pid. A rank lives until its socket ends, and never longer than the server.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
_modules: dict[str, ModuleType] = {}


def send(sock: socket.socket, value: object) -> None:
    """Write one pickled value with its length before it."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(struct.pack("<Q", len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Read one value; ``EOFError`` at the end of the connection."""
    return pickle.loads(_exactly(sock, struct.unpack("<Q", _exactly(sock, 8))[0]))


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve() -> None:
    """Fork a rank for every request until the connection ends."""
    die_with_parent()
    for name in ("numpy", "pytest", "torch.distributed", "frogzmq.backend.create"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; nobody asks for a status
    control = socket.socket(fileno=0)
    while True:
        data, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_rank(socket.socket(fileno=fds[0]), json.loads(data))
        os.close(fds[0])
        control.send(str(pid).encode())


def _become_rank(sock: socket.socket, spec: Mapping[str, Any]) -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        while True:
            job = receive(sock)
            send(sock, _run(job))
    except (EOFError, ConnectionError):
        os._exit(0)


def _run(job: Mapping[str, Any]) -> tuple[bool, Any]:
    """Make the group, call the function, leave; (True, value) or (False, traceback)."""
    import torch.distributed as dist

    os.environ["FROGZMQ_RUNTIME_DIR"] = job["machine"]
    try:
        if job["url"]:
            dist.init_process_group(
                job["backend"], init_method=job["url"], rank=job["rank"], world_size=job["size"],
                timeout=timedelta(seconds=job["timeout_s"]), pg_options=job["options"],
            )  # fmt: skip
        value = getattr(_load(job["file"]), job["name"])(job["rank"], job["size"], *job["args"])
        return True, value
    except BaseException:
        return False, traceback.format_exc()
    finally:
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch goes on counting after an init that failed, and names groups by the count.
        dist.distributed_c10d._world.group_count = 0


def _load(file: str) -> ModuleType:
    """The test module, once per rank."""
    module = _modules.get(file)
    if module is None:
        spec = importlib.util.spec_from_file_location(f"pooled_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return module


if __name__ == "__main__":
    serve()
