from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from frogzmq.bench import probes

GONE = 2**22 + 1
"""Above the largest pid that Linux gives."""


def test_cpu_seconds_follow_the_process() -> None:
    before = probes.cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert probes.cpu_seconds(os.getpid()) - before >= 0.05
    assert abs(probes.cpu_seconds(os.getpid()) - time.process_time()) < 0.05
    assert probes.cpu_seconds(GONE) == 0.0


def test_cpu_seconds_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            until = time.monotonic() + 20
            while probes.cpu_seconds(busy.pid) < 0.05:
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            busy.kill()


def test_private_bytes_count_anonymous_memory_only(tmp_path: Path) -> None:
    size = 32 << 20
    before = probes.private_bytes(os.getpid())
    anonymous = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anonymous.write(b"x" * size)
    with_anonymous = probes.private_bytes(os.getpid())
    assert size * 0.8 < with_anonymous - before < size * 2.5
    with open(tmp_path / "arena.0", "w+b") as file:
        file.truncate(size)
        shared = mmap.mmap(file.fileno(), size)
        for offset in range(0, size, 4096):
            shared[offset] = 1
        assert probes.private_bytes(os.getpid()) - with_anonymous < size / 2
        shared.close()
    anonymous.close()
    assert probes.private_bytes(GONE) == 0


def test_allocated_bytes_see_through_holes(tmp_path: Path) -> None:
    sparse = tmp_path / "arena.0"
    with open(sparse, "wb") as file:
        file.truncate(1 << 30)
        file.write(b"x" * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert 1 << 20 <= probes.allocated_bytes([sparse, tmp_path / "gone"]) < 16 << 20


def test_arena_files_are_the_segments_in_its_directories(tmp_path: Path) -> None:
    first, second = tmp_path / "memory", tmp_path / "disk"
    for path in (first / "arena.0", first / "arena.2", second / "arena.1", second / "other.0"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = probes.arena_files([str(first), str(second), str(tmp_path / "gone")])
    assert found == sorted([first / "arena.0", first / "arena.2", second / "arena.1"])


def test_tcp_bytes_are_counted_by_the_machine_of_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours:
            theirs, _ = server.accept()
            with theirs:
                ports = {port: 1, ours.getsockname()[1]: 0}
                before = probes.sent_to(ports, 0)
                ours.sendall(b"x" * 50_000)
                theirs.sendall(b"y" * 7)
                left = 50_000
                while left:
                    left -= len(theirs.recv(left))
                # Both ends are in this process; seen from machine 0 only ours sends to machine 1.
                until = time.monotonic() + 10
                while probes.sent_to(ports, 0) - before != 50_000 and time.monotonic() < until:
                    time.sleep(0.01)
                assert probes.sent_to(ports, 0) - before == 50_000
                assert probes.sent_to({}, 0) == 0


def test_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in probes.children_of(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in probes.children_of(os.getpid())
