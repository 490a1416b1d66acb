from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.peek_samples import full_snapshot

import frogzmq
from frogzmq.cli import ask
from frogzmq.config import SOCKET_NAME
from frogzmq.errors import ConfigError, DeadlineExceeded, PeerUnreachable, VersionMismatch
from frogzmq.wire import messages, ranks

ROOT = Path(__file__).parents[2]


class StandIn:
    """Answers on a peer's socket as a peer would; ``mute`` and ``protocol`` make it a bad one."""

    def __init__(self, directory: Path, pid: int) -> None:
        self.directory, self.pid = directory, pid
        self.mute = False
        self.refusal: ranks.Error | None = None
        self.protocol = messages.PROTOCOL
        self.heard: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(directory / SOCKET_NAME))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        assembler = ranks.Assembler(ranks.FROM_RANK)
        while datagram := link.recv(1 << 17):
            message = assembler.feed(datagram)
            self.heard.append(type(message).__name__)
            if self.mute:
                continue
            if self.refusal is not None:
                self._send(link, self.refusal)
            elif isinstance(message, ranks.Hello):
                self._send(link, self._welcome())
            elif isinstance(message, ranks.Peek):
                self._send(link, ranks.Peeked(snapshot=full_snapshot()))
            elif isinstance(message, ranks.Stop):
                os.kill(self.pid, signal.SIGTERM)

    def _welcome(self) -> ranks.Welcome:
        who = messages.Identity(peer="a" * 16, instance="i", name="alpha", endpoints=[])
        fields: dict[str, Any] = {"who": who, "pid": self.pid, "arena": [], "ephemeral": False}
        return ranks.Welcome.model_construct(protocol=self.protocol, **fields)

    @staticmethod
    def _send(link: socket.socket, message: ranks.Json) -> None:
        for piece in ranks.encode_json(message):
            link.send(piece)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Something that can be stopped in a peer's place."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def peer(directory: Path, process: subprocess.Popen[bytes]) -> Iterator[StandIn]:
    stand_in = StandIn(directory, process.pid)
    yield stand_in
    stand_in.close()


def frogzmq_command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FROGZMQ_")}
    return subprocess.run(
        [sys.executable, "-m", "frogzmq.cli.main", *args],
        env=clean | env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# ------------------------------------------------------------------------ asking
def test_a_peer_is_asked_for_its_snapshot(peer: StandIn, directory: Path) -> None:
    with ask.Peer(directory) as connection:
        assert connection.welcome.who.name == "alpha"
        assert connection.snapshot() == full_snapshot()
        assert connection.snapshot()["protocol"] == 1
    assert peer.heard[:3] == ["Hello", "Peek", "Peek"]


def test_no_peer_is_said_with_the_folder_and_what_to_do(directory: Path) -> None:
    with pytest.raises(PeerUnreachable, match=f"no peer runs for {directory}; start one with `frogzmq peer`"):
        ask.Peer(directory)


def test_a_dead_peers_socket_is_no_peer(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(os.fspath(directory / SOCKET_NAME))
    with pytest.raises(PeerUnreachable, match="no peer runs"):
        ask.Peer(directory)


def test_a_silent_peer_is_given_up_on(peer: StandIn, directory: Path) -> None:
    peer.mute = True
    with pytest.raises(DeadlineExceeded, match="has not answered for 0.2 s"):
        ask.Peer(directory, timeout_s=0.2)


def test_another_protocol_is_refused_with_both_versions(peer: StandIn, directory: Path) -> None:
    peer.protocol = 99
    with pytest.raises(VersionMismatch, match="this side speaks 1, .* speaks 99"):
        ask.Peer(directory)


def test_a_refusal_keeps_its_class_and_text(peer: StandIn, directory: Path) -> None:
    peer.refusal = ranks.Error(code="ConfigError", text="not for you", req=0)
    with pytest.raises(ConfigError, match="not for you"):
        ask.Peer(directory)


def test_stop_waits_until_the_process_is_gone(
    peer: StandIn, directory: Path, process: subprocess.Popen[bytes]
) -> None:
    with ask.Peer(directory) as connection:
        connection.stop()
    assert process.wait(10) == -signal.SIGTERM


def test_stop_that_has_no_effect_says_how_to_go_on(peer: StandIn, directory: Path, monkeypatch) -> None:
    monkeypatch.setattr(ask, "STOP_S", 0.1)
    with ask.Peer(directory) as connection:
        peer.mute = True
        with pytest.raises(DeadlineExceeded, match=f"still runs .* kill -9 {peer.pid}"):
            connection.stop()


# ---------------------------------------------------------------------- commands
def test_peek_once_json(peer: StandIn, directory: Path) -> None:
    done = frogzmq_command("peek", "--once", "--json", FROGZMQ_RUNTIME_DIR=str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == full_snapshot()


def test_peek_without_a_terminal_prints_once(peer: StandIn, directory: Path) -> None:
    done = frogzmq_command("peek", "--runtime-dir", str(directory))
    assert done.returncode == 0
    assert done.stdout.count("peer alpha") == 1
    assert "2-3 beta +2.10ms > 0-1 here +31ms" in done.stdout


def test_peek_json_gives_a_line_per_look(peer: StandIn, directory: Path) -> None:
    command = [sys.executable, "-m", "frogzmq.cli.main", "peek", "--json", "--interval", "0.05"]
    env = os.environ | {"FROGZMQ_RUNTIME_DIR": str(directory)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        lines = [running.stdout.readline() for _ in range(3)]
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == b""
        assert running.wait(10) == 130
    assert [json.loads(line) for line in lines] == [full_snapshot()] * 3


def test_peek_on_a_terminal_is_live_and_ends_with_ctrl_c(peer: StandIn, directory: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "frogzmq.cli.main", "peek", "--interval", "0.05"]
    env = os.environ | {
        "FROGZMQ_RUNTIME_DIR": str(directory),
        "TERM": "xterm",
        "COLUMNS": "160",
        "LINES": "50",
    }
    with subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as running:
        os.close(theirs)
        seen = b""
        while seen.count(b"peer alpha") < 3:
            seen += os.read(ours, 1 << 16)
        running.send_signal(signal.SIGINT)
        seen = b""
        try:
            while piece := os.read(ours, 1 << 16):
                seen += piece
        except OSError:
            pass  # that is how a terminal says that nobody writes to it any more
        assert running.wait(10) == 0
    os.close(ours)
    assert b"Traceback" not in seen


def test_tools_peek_is_the_same_command(peer: StandIn, directory: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"FROGZMQ_RUNTIME_DIR": str(directory), "PATH": path}
    done = subprocess.run(
        [ROOT / "tools" / "peek", "--once", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == full_snapshot()


def test_peer_stop(peer: StandIn, directory: Path, process: subprocess.Popen[bytes]) -> None:
    done = frogzmq_command("peer", "--stop", "--runtime-dir", str(directory))
    assert (done.returncode, done.stdout) == (0, f"stopped peer alpha (pid {process.pid})\n")


@pytest.mark.parametrize(
    ("args", "env", "parts"),
    [
        (["peek"], {}, ["no peer runs for "]),
        (["peer", "--stop"], {}, ["no peer runs for "]),
        (["peer", "--stop", "--ephemeral"], {}, ["--stop goes with --runtime-dir only"]),
        (["peer", "--config", "nowhere.toml"], {}, ["nowhere.toml: cannot read"]),
        (["peer"], {"FROGZMQ_CONFIG": "/nowhere.toml"}, ["/nowhere.toml: cannot read"]),
        (["peer"], {"FROGZMQ_RUNTIME_DIR": "/" + "x" * 200}, ["107", "FROGZMQ_RUNTIME_DIR"]),
        (["peek"], {"FROGZMQ_MOED": "shard"}, ["FROGZMQ_MOED (did you mean FROGZMQ_MODE?)"]),
        (["peek", "--onec"], {}, ["--onec"]),
        (["peak"], {}, ["peak"]),
    ],
)
def test_errors_are_a_line_and_code_2(
    directory: Path, args: list[str], env: dict[str, str], parts: list[str]
) -> None:
    done = frogzmq_command(*args, **{"FROGZMQ_RUNTIME_DIR": str(directory)} | env)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_version_names_release_and_protocol() -> None:
    done = frogzmq_command("version")
    assert done.stdout == f"frogzmq {frogzmq.__version__} (protocol {messages.PROTOCOL})\n"


def test_commands_for_peers_load_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, frogzmq.cli.main, frogzmq.cli.peek, frogzmq.cli.ask, frogzmq.cli.view;"
        "print([m for m in ('torch', 'zmq', 'numpy', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
