"""The client against a small peer: ops, window, failures, ends. No torch."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fakepeer import FakePeer, join_request
from support.ranks import ROOT, machine_dirs

from frogzmq.client import Client, GroupHandle
from frogzmq.client.connection import Connection
from frogzmq.client.group import SEGMENT_BYTES
from frogzmq.client.options import Options, options_from
from frogzmq.descriptor import Descriptor
from frogzmq.errors import (
    ConfigError,
    DeadlineExceeded,
    FrogError,
    GroupBroken,
    PeerUnreachable,
    RankLost,
    StoreFull,
)
from frogzmq.types import OpKind, Order, ReduceOp
from frogzmq.wire import ranks as w
from frogzmq.wire.limits import WINDOW


@pytest.fixture
def folder() -> Iterator[Path]:
    (path,) = machine_dirs(1)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
def peer(folder: Path) -> Iterator[FakePeer]:
    with FakePeer(folder) as peer:
        yield peer


def join_all(folder: Path, size: int, timeout_s: float = 20.0) -> list[GroupHandle]:
    clients = [Client(folder) for _ in range(size)]
    groups: dict[int, GroupHandle] = {}

    def join(rank: int) -> None:
        groups[rank] = clients[rank].join(join_request(rank, size, timeout_s=timeout_s))

    threads = [threading.Thread(target=join, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [groups[r] for r in range(size)]


def close_all(groups: list[GroupHandle]) -> None:
    for group in groups:
        group.client.close()


def all_reduce(n: int, dtype: str = "float32") -> Descriptor:
    return Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, dtype, (n,))


def give(group: GroupHandle, n: int, value: float, **options: object):
    """Post an all_reduce of ``n`` values; returns the op and the array for its result."""
    data = np.full(n, value, np.float32)
    out = np.zeros(n, np.float32)
    return group.post(all_reduce(n), data.view(np.uint8), [out.view(np.uint8)], **options), out


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 100_003, 5_000_000])
def test_all_reduce_of_every_size(folder: Path, peer: FakePeer, n: int) -> None:
    groups = join_all(folder, 2)
    ops = [give(group, n, rank + 1.0) for rank, group in enumerate(groups)]
    for op, out in ops:
        op.wait(20)
        assert (out == 3.0).all()
    close_all(groups)


def test_large_contribution_is_announced_while_it_is_copied(folder: Path, peer: FakePeer) -> None:
    groups = join_all(folder, 1)
    op, _ = give(groups[0], 5_000_000, 1.0)
    op.wait(20)
    post = peer.said(w.Post)[0]
    assert (post.nbytes, post.ready) == (20_000_000, SEGMENT_BYTES)
    steps = [*range(2 * SEGMENT_BYTES, 20_000_000, SEGMENT_BYTES), 20_000_000]
    assert [m.ready for m in peer.said(w.Ready)] == steps
    assert peer.said(w.Consumed) == [w.Consumed(1, 1)]
    close_all(groups)


def test_result_goes_to_several_sinks_in_order(folder: Path, peer: FakePeer) -> None:
    groups = join_all(folder, 1)
    data = np.arange(100_000, dtype=np.uint8)
    sinks = [np.zeros(n, np.uint8) for n in (1, 0, 49_999, 50_000)]
    descriptor = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "uint8", (100_000,))
    groups[0].post(descriptor, data, sinks).wait(20)
    assert (np.concatenate(sinks) == data).all()
    close_all(groups)


def test_ops_beyond_the_window_queue_and_complete(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    ops = [give(groups[0], 10, float(i)) for i in range(3 * WINDOW)]
    deadline = time.monotonic() + 10
    while len(peer.held) < WINDOW and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(peer.said(w.Post)) == WINDOW
    peer.release()
    for i, (op, out) in enumerate(ops):
        op.wait(20)
        assert out[0] == i
    assert [m.seq for m in peer.said(w.Post)] == list(range(1, 3 * WINDOW + 1))
    close_all(groups)


def test_fence_waits_for_earlier_ops(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    first, _ = give(groups[0], 10, 1.0)
    barrier = groups[0].post(Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,)), fence=True)
    time.sleep(0.3)
    assert [m.seq for m in peer.said(w.Post)] == [1]
    assert not barrier.is_done()
    peer.release()
    barrier.wait(20)
    assert first.done
    close_all(groups)


def test_callbacks_run_once_without_anyone_waiting(folder: Path, peer: FakePeer) -> None:
    groups = join_all(folder, 2)
    ops = [give(group, 100_000, 1.0) for group in groups]
    seen: list[int] = []
    all_in = threading.Event()

    def watcher(op: object) -> None:
        seen.append(op.seq)
        if len(seen) == 2:
            all_in.set()

    for op, _ in ops:
        op.add_done_callback(watcher)
    assert all_in.wait(20)
    assert seen == [1, 1]
    assert all((out == 2.0).all() for _, out in ops)
    late: list[int] = []
    ops[0][0].add_done_callback(lambda op: late.append(op.seq))
    assert late == [1]
    close_all(groups)


def test_many_threads_wait_for_one_op(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    op, out = give(groups[0], 10, 4.0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            op.wait(20)
            assert out[0] == 4.0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    peer.release()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    close_all(groups)


def test_short_wait_leaves_the_op_going_on(folder: Path, peer: FakePeer) -> None:
    peer.hold, peer.explanation = True, "rank 9 has not called it"
    groups = join_all(folder, 1)
    op, out = give(groups[0], 10, 1.0)
    with pytest.raises(DeadlineExceeded, match="op 1 .*all_reduce.*rank 9 has not called it"):
        op.wait(0.05)
    peer.release()
    op.wait(20)
    assert out[0] == 1.0
    close_all(groups)


def test_ops_own_timeout_names_who_is_missing_and_breaks_the_group(folder: Path, peer: FakePeer) -> None:
    peer.hold, peer.explanation = True, "rank 9 has not called it"
    groups = join_all(folder, 1)
    op, _ = give(groups[0], 10, 1.0, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded, match=r"op 1 of group 'test'.*float32\[10\].*rank 9 has not"):
        op.wait()
    with pytest.raises(DeadlineExceeded):
        give(groups[0], 10, 1.0)
    leave = peer.said(w.Leave)[0]
    assert not leave.clean
    assert "DeadlineExceeded" in leave.reason
    close_all(groups)


def test_timeout_is_noticed_though_nobody_waits(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    failed = threading.Event()
    op, _ = give(groups[0], 10, 1.0, timeout_s=0.3)
    op.add_done_callback(lambda _: failed.set())
    assert failed.wait(10)
    assert isinstance(op.error, DeadlineExceeded)
    close_all(groups)


def test_failure_hits_ops_from_its_number_on(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    first, out = give(groups[0], 10, 1.0)
    second, untouched = give(groups[0], 10, 1.0)
    while len(peer.held) < 2:
        time.sleep(0.01)
    peer.fail(2, "RankLost", "rank 3 was killed")
    with pytest.raises(RankLost, match="rank 3 was killed"):
        second.wait(20)
    with pytest.raises(RankLost):
        second.wait()
    assert not untouched.any()
    with pytest.raises(RankLost):
        give(groups[0], 10, 1.0)
    peer.release()
    first.wait(20)
    assert out[0] == 1.0
    close_all(groups)


def test_lost_peer_fails_everything(folder: Path, peer: FakePeer) -> None:
    peer.hold = True
    groups = join_all(folder, 1)
    op, _ = give(groups[0], 10, 1.0)
    threading.Timer(0.2, peer.kill).start()
    with pytest.raises(PeerUnreachable, match="this machine's peer"):
        op.wait(20)
    with pytest.raises(PeerUnreachable):
        give(groups[0], 10, 1.0)
    close_all(groups)


def test_full_arena_fails_the_op_and_tells_the_others(folder: Path) -> None:
    with FakePeer(folder, max_lease=1 << 20) as peer:
        groups = join_all(folder, 1)
        op, _ = give(groups[0], 1_000_000, 1.0)
        with pytest.raises(StoreFull, match="the arena is full"):
            op.wait(20)
        close_all(groups)
        assert "StoreFull" in peer.said(w.Leave)[0].reason


def test_arena_for_one_op_at_a_time_still_completes_many(folder: Path) -> None:
    with FakePeer(folder, max_lease=1 << 20):
        groups = join_all(folder, 1)
        ops = [give(groups[0], 200_000, float(i)) for i in range(10)]
        for i, (op, out) in enumerate(ops):
            op.wait(20)
            assert out[0] == i
        close_all(groups)


def test_notes_are_logged(folder: Path, peer: FakePeer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="frogzmq"):
        close_all(join_all(folder, 1))
    assert "group 'test': rank 0 is here" in caplog.text


def test_incomplete_group_fails_in_its_time(
    folder: Path, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frogzmq.client.client.JOIN_GRACE_S", 0.1)
    client = Client(folder)
    with pytest.raises(DeadlineExceeded, match="group 'test' was not complete"):
        client.join(join_request(0, 2, timeout_s=0.2))
    assert client.groups() == []
    client.close()


def test_peek_takes_split_messages(folder: Path, peer: FakePeer) -> None:
    client = Client(folder)
    assert len(client.peek()["filler"]) == 100_000
    client.close()


def test_closing_leaves_no_thread_and_says_goodbye(folder: Path, peer: FakePeer) -> None:
    groups = join_all(folder, 1)
    op, _ = give(groups[0], 10, 1.0)
    op.add_done_callback(lambda _: None)
    op.wait(20)
    groups[0].close()
    with pytest.raises(GroupBroken, match="destroyed"):
        give(groups[0], 10, 1.0)
    groups[0].client.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("frogzmq")]
    time.sleep(0.1)
    assert peer.said(w.Leave)[0].clean
    assert peer.said(w.Bye)[0].clean


def test_forked_child_is_refused_and_parent_goes_on(folder: Path, peer: FakePeer) -> None:
    groups = join_all(folder, 1)
    op, _ = give(groups[0], 10, 1.0)
    op.wait(20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            give(groups[0], 10, 1.0)
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            groups[0].client.close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    op, out = give(groups[0], 10, 2.0)
    op.wait(20)
    assert out[0] == 2.0
    close_all(groups)


def start_script(folder: Path, body: str, **env: str) -> subprocess.Popen[str]:
    script = """
import os, sys, time
sys.path.insert(0, os.environ["TESTS"])
import numpy as np
from support.fakepeer import join_request
from frogzmq.client import Client
client = Client()
group = client.join(join_request(0, 1))
print("joined", flush=True)
"""
    child_env = {
        **os.environ, "PYTHONPATH": str(ROOT), "TESTS": str(ROOT / "tests"),
        "FROGZMQ_RUNTIME_DIR": str(folder), **env,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        env=child_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_uncaught_error_is_told_before_exit_handlers(folder: Path, peer: FakePeer) -> None:
    body = """
    import atexit
    atexit.register(lambda: time.sleep(0.2))
    raise ValueError("bad batch")
    """
    process = start_script(folder, body)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "bad batch" in stderr
    assert [(m.clean, m.reason) for m in peer.said(w.Bye)] == [(False, "ValueError: bad batch")]


def test_interrupt_is_told(folder: Path, peer: FakePeer) -> None:
    process = start_script(folder, "time.sleep(30)")
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert [(m.clean, m.reason) for m in peer.said(w.Bye)] == [(False, "interrupted")]


def test_normal_end_without_close_is_clean(folder: Path, peer: FakePeer) -> None:
    process = start_script(folder, "pass")
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert [(m.clean, m.reason) for m in peer.said(w.Bye)] == [(True, "exited")]


def test_rank_ends_when_its_launcher_dies(folder: Path, peer: FakePeer) -> None:
    launcher = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""
    worker = """
import os, sys, time
sys.path.insert(0, os.environ["TESTS"])
from frogzmq.client import Client
client = Client()
print("up", flush=True)
time.sleep(60)
"""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "TESTS": str(ROOT / "tests"),
        "FROGZMQ_RUNTIME_DIR": str(folder), "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, worker], env=env, stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.stdout.close()
    assert [m.clean for m in peer.said(w.Bye)] == [False]
    assert "launcher" in peer.said(w.Bye)[0].reason


def test_peer_that_does_not_come_up_is_quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = folder / "python"
    fake.write_text("#!/bin/sh\necho 'no room for frogs' >&2\nexit 3\n")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PeerUnreachable, match=r"(?s)ended at once with code 3.*no room for frogs"):
        Client(folder)


def test_options_name_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'mod'.*did you mean 'mode'.*mode, order"):
        Options(mod="shard")
    with pytest.raises(ConfigError, match=r"'sharp'.*'shard'.*auto, shard, faithful"):
        Options(mode="sharp")
    with pytest.raises(ConfigError, match=r"'glo'.*'gloo'.*machine, rank, gloo"):
        Options(order="glo")
    with pytest.raises(ConfigError, match="expected frogzmq.Options"):
        options_from(3)
    assert options_from({"order": "rank"}).resolve({}).order == Order.RANK
    assert options_from(None).resolve({"FROGZMQ_ORDER": "rank"}).order == Order.RANK
    assert Options(order="machine").resolve({"FROGZMQ_ORDER": "rank"}).order == Order.MACHINE
    assert options_from(None).resolve({"FROGZMQ_ORDER": "gloo"}).order == Order.GLOO
    with pytest.raises(ConfigError, match="FROGZMQ_ORDER"):
        options_from(None).resolve({"FROGZMQ_ORDER": "ring"})


def test_a_connection_that_ends_while_a_message_is_handled_raises_nothing_in_whoever_reads() -> None:
    """The background thread may be about to answer when another thread closes the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost: list[FrogError] = []

    def answer(_: object) -> None:
        connection.close(PeerUnreachable("closed"))
        connection.send(w.encode_consumed(1, 1))

    connection = Connection(ours, answer, lambda now: None, lost.append)
    theirs.send(w.encode_freed(1, 1))
    connection.pump()
    assert [str(error) for error in lost] == ["closed"]
    theirs.close()
