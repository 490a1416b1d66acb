"""Start, idle, stop and end of the peer process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fleet import ROOT, Fleet

from frogzmq.wire import ranks

MAX_RSS_BYTES = 80 << 20


def test_a_peer_starts_answers_and_stops_clean(fleet: Fleet) -> None:
    peer = fleet.start(name="alpha")
    with peer.local() as local:
        assert local.welcome.who.name == "alpha"
        assert local.welcome.pid == peer.pid
        assert not local.welcome.ephemeral
    started = time.monotonic()
    assert peer.stop(signal.SIGTERM) == 0
    assert time.monotonic() - started < 5
    assert not peer.socket_path.exists()
    assert not peer.shared_memory.exists()


def test_sigint_stops_it_too(fleet: Fleet) -> None:
    peer = fleet.start()
    assert peer.stop(signal.SIGINT) == 0


def test_a_stop_request_ends_it(fleet: Fleet) -> None:
    peer = fleet.start()
    with peer.local() as local:
        local.say(ranks.Stop())
        assert local.ends()
    assert peer.wait() == 0


def test_identity_stays_over_a_restart_and_the_instance_does_not(fleet: Fleet) -> None:
    peer = fleet.start()
    first = peer.peek()["me"]
    peer.stop()
    second = fleet.start(runtime_dir=peer.runtime_dir).peek()["me"]
    assert first["peer"] == second["peer"]
    assert first["instance"] < second["instance"]


def test_idle_it_is_small_and_sleeps(fleet: Fleet) -> None:
    peer = fleet.start()
    before = peer.peek()["process"]
    time.sleep(2.0)
    after = peer.peek()["process"]
    assert after["rss_bytes"] - after["shared_bytes"] < MAX_RSS_BYTES
    assert after["cpu_s"] - before["cpu_s"] < 0.1, "an idle peer must not poll"


def test_the_daemon_does_not_load_torch() -> None:
    code = (
        "import sys, frogzmq.daemon.main; "
        "bad = [m for m in ('torch', 'asyncio', 'typer', 'rich') if m in sys.modules]; "
        "sys.exit(','.join(bad) or 0)"
    )
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_second_peer_in_one_folder_is_refused_and_names_the_first(fleet: Fleet) -> None:
    first = fleet.start()
    second = fleet.start(runtime_dir=first.runtime_dir, ready=False)
    assert second.wait(5.0) == 1
    assert str(first.pid) in second.text()
    assert "FROGZMQ_RUNTIME_DIR" in second.text()
    assert first.answers(), "the first one must not notice"


def test_a_killed_peer_leaves_nothing_that_stops_the_next(fleet: Fleet) -> None:
    first = fleet.start()
    with first.local() as local:
        local.send(ranks.encode_lease(1, 1 << 20))
        local.expect(ranks.Leased)
    first.process.kill()
    first.process.wait()
    assert first.socket_path.exists()
    second = fleet.start(runtime_dir=first.runtime_dir)
    assert second.peek()["arena"]["leased_bytes"] == 0
    assert second.stop() == 0


@pytest.mark.parametrize("setting", ["port", "pub_port"])
def test_a_port_in_use_is_named(fleet: Fleet, setting: str) -> None:
    taken = fleet.start().peek()["fabric"]["port"]
    peer = fleet.start(config=f"{setting} = {taken}", ready=False)
    assert peer.wait(5.0) == 1
    assert f"0.0.0.0:{taken}" in peer.text()
    assert setting in peer.text()


def test_a_wrong_setting_is_one_line_not_a_traceback(fleet: Fleet) -> None:
    peer = fleet.start(config="lane = 3", ready=False)
    assert peer.wait(5.0) == 1
    assert "'lanes'" in peer.text()
    assert "Traceback" not in peer.text()


def test_secrecy_off_is_said_aloud(fleet: Fleet) -> None:
    peer = fleet.start(config='secrecy = "off"')
    assert "WARNING" in peer.text()
    assert "secrecy is off" in peer.text()
    assert peer.peek()["me"]["key"] == ""


def test_an_ephemeral_peer_ends_with_its_last_rank(fleet: Fleet) -> None:
    peer = fleet.start(ephemeral=True)
    first, second = peer.local(torch="2.13"), peer.local(torch="2.13")
    assert first.welcome.ephemeral
    first.close()
    time.sleep(1.5)
    assert peer.process.poll() is None, "one rank is left"
    second.say(ranks.Bye(clean=True, reason="done"))
    second.close()
    assert peer.wait(5.0) == 0
    assert "no rank is left" in peer.text()


def test_a_command_that_looks_on_does_not_keep_an_ephemeral_peer_alive(fleet: Fleet) -> None:
    peer = fleet.start(ephemeral=True)
    with peer.local():
        peer.local(torch="2.13").close()
        assert peer.wait(5.0) == 0


def test_runtime_folder_that_others_can_enter_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    peer = fleet.start(runtime_dir=folder, ready=False)
    assert peer.wait(5.0) == 1
    assert "chmod 700" in peer.text()
