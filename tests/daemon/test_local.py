"""The machine-local socket: ranks, what they may do, and what happens to who does something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
from support.fleet import ROOT, Fleet, PeerProcess
from support.local import Local

from frogzmq.descriptor import Descriptor
from frogzmq.store.map import ArenaMap
from frogzmq.types import OpKind, ReduceOp
from frogzmq.wire import limits, ranks
from frogzmq.wire.messages import PROTOCOL

SUM4 = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (4,))


def ones(value: float, count: int = 4) -> bytes:
    return np.full(count, value, np.float32).tobytes()


def pair(peer: PeerProcess, gid: str = "ab" * 16) -> tuple[Local, Local]:
    """Two ranks of one group, joined."""
    both = peer.local(), peer.local()
    for rank, local in enumerate(both):
        local.join(rank, [local.welcome.who] * 2, gid=gid)
    for local in both:
        local.expect(ranks.Joined)
    return both


def test_two_ranks_get_the_sum(fleet: Fleet) -> None:
    a, b = pair(fleet.start())
    for seq in range(1, 4):
        a.post(seq, SUM4, ones(1))
        b.post(seq, SUM4, ones(2))
        for local in (a, b):
            result = local.expect(ranks.Result)
            assert result.seq == seq
            assert result.flags == ranks.INLINE | ranks.FINAL
            assert bytes(result.payload) == ones(3)


def test_large_contributions_go_through_the_arena_and_are_freed(fleet: Fleet) -> None:
    peer = fleet.start()
    count = 3 << 20
    descriptor = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (count,))
    both = pair(peer)
    arenas = [ArenaMap(local.welcome.arena) for local in both]
    for value, (local, arena) in enumerate(zip(both, arenas, strict=True), 1):
        local.send(ranks.encode_lease(value, count * 4))
        lease = local.expect(ranks.Leased)
        arena.view(lease.seg, lease.off, count * 4)[:] = np.frombuffer(ones(value, count), np.uint8)
        half = count * 2
        local.send(ranks.encode_post(1, 1, 0, lease.seg, lease.off, count * 4, half, descriptor.encoded))
        local.send(ranks.encode_ready(1, 1, count * 4))
    for local, arena in zip(both, arenas, strict=True):
        result = local.expect(ranks.Result)
        while not result.flags & ranks.FINAL:
            result = local.expect(ranks.Result)
        got = arena.view(result.seg, result.off, result.total).view(np.float32)
        assert (got == 3).all()
        local.send(ranks.encode_consumed(1, 1))
    for local in both:
        assert local.expect(ranks.Freed).seq == 1
    for arena in arenas:
        arena.close()
    for local in both:
        local.close()
    assert peer.wait_for(lambda snapshot: snapshot["arena"]["leased_bytes"] == 0)["arena"]["idle_bytes"] > 0
    peer.wait_for(lambda snapshot: snapshot["arena"]["idle_bytes"] == 0)  # kept for a while, not for ever


def test_a_rank_that_vanishes_is_named_to_the_others(fleet: Fleet) -> None:
    peer = fleet.start(name="alpha")
    a, b = pair(peer)
    a.post(1, SUM4, ones(1))
    b.close()
    failed = a.expect(ranks.Failed)
    assert (failed.code, failed.seq) == ("RankLost", 1)
    assert "rank 1" in failed.text
    assert f"process {os.getpid()} on alpha" in failed.text
    assert "without saying goodbye" in failed.text


def test_a_rank_that_is_killed_gives_its_leases_back(fleet: Fleet) -> None:
    peer = fleet.start()
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1] + '/tests'); "
        "from pathlib import Path; from support.local import Local; from frogzmq.wire import ranks; "
        "l = Local(Path(sys.argv[2]), torch='2'); l.send(ranks.encode_lease(1, 8 << 20)); "
        "l.expect(ranks.Leased); print('leased', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    command = [sys.executable, "-c", code, os.fspath(ROOT), os.fspath(peer.socket_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "leased" in done.stdout, done.stderr
    assert done.returncode == -9
    peer.wait_for(lambda snapshot: snapshot["arena"]["leased_bytes"] == 0)


def test_a_killed_rank_is_noticed_though_its_child_holds_the_socket_open(fleet: Fleet) -> None:
    """Workers of a data loader are forked and may outlive their rank."""
    peer = fleet.start(name="alpha")
    code = (
        "import os, signal, sys, time; sys.path.insert(0, sys.argv[1] + '/tests'); "
        "from pathlib import Path; from support.local import Local; from frogzmq.wire import ranks; "
        "l = Local(Path(sys.argv[2]), torch='2'); "
        "l.join(1, [l.welcome.who] * 2, pid=1); l.expect(ranks.Joined); "
        "child = os.fork(); child or time.sleep(60); print(child, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT)}
    command = [sys.executable, "-c", code, os.fspath(ROOT), os.fspath(peer.socket_path)]
    rank = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    a = peer.local()
    a.join(0, [a.welcome.who] * 2, pid=1)
    a.expect(ranks.Joined)
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    try:
        assert "rank 1" in a.expect(ranks.Failed).text
        os.kill(child, 0)  # it still lives
    finally:
        os.kill(child, signal.SIGKILL)
        rank.stdout.close()
        rank.wait()


def test_bye_with_a_reason_is_passed_on(fleet: Fleet) -> None:
    a, b = pair(fleet.start())
    b.say(ranks.Bye(clean=False, reason="ValueError: bad batch"))
    assert "ValueError: bad batch" in a.expect(ranks.Failed).text


GARBAGE = {
    "empty json": bytes([ranks.JSON[0].KIND, 0]),
    "unknown kind": b"\xc8hello",
    "short struct": bytes([3, 1]),
    "peer's own kind": ranks.encode_freed(1, 1),
    "too long": bytes([3]) + bytes(limits.DATAGRAM_BYTES + 100),
    "unknown handle": ranks.encode_consumed(7, 1),
    "foreign memory": ranks.encode_unlease(0, 4096),
}


def test_garbage_is_answered_counted_and_ends_that_connection_only(fleet: Fleet) -> None:
    peer = fleet.start()
    bystander = peer.local()
    for count, (name, datagram) in enumerate(GARBAGE.items(), 1):
        with peer.local() as local:
            local.send(datagram)
            assert local.expect(ranks.Error).code == "WireError", name
            assert local.ends(), name
        assert bystander.peek()["counters"]["rejected_frames"] == count, name


def test_whoever_does_not_greet_is_disconnected(fleet: Fleet) -> None:
    peer = fleet.start()
    with peer.local(hello=False) as local:
        local.say(ranks.Peek())
        assert "before Hello" in local.expect(ranks.Error).text
        assert local.ends()


def test_another_protocol_version_is_shown_both_versions(fleet: Fleet) -> None:
    peer = fleet.start()
    with peer.local(hello=False) as local:
        hello = ranks.Hello.model_construct(protocol=PROTOCOL + 1, pid=1, version="9", torch="2", python="3")
        local.say(hello)
        error = local.expect(ranks.Error)
        assert error.code == "VersionMismatch"
        assert f"speaks {PROTOCOL}," in error.text
        assert f"speaks {PROTOCOL + 1};" in error.text


def wrong_posts() -> dict[str, bytes]:
    encoded, data = SUM4.encoded, ones(1)
    bad_cell = Descriptor(OpKind.ALL_REDUCE, ReduceOp.BXOR, "float32", (4,)).encoded
    inline = ranks.INLINE
    return {
        "number skipped": ranks.encode_post(1, 5, inline, 0, 0, 16, 16, encoded, data),
        "wrong size": ranks.encode_post(1, 1, inline, 0, 0, 12, 12, encoded, data[:12]),
        "memory that is not leased": ranks.encode_post(1, 1, 0, 0, 0, 16, 16, encoded),
        "no data though it owes some": ranks.encode_post(1, 1, ranks.NODATA, 0, 0, 0, 0, encoded),
        "unsupported cell": ranks.encode_post(1, 1, inline, 0, 0, 16, 16, bad_cell, data),
        "no descriptor": ranks.encode_post(1, 1, inline, 0, 0, 16, 16, b"[1", data),
    }


def test_a_post_that_makes_no_sense_fails_its_rank_and_spares_the_peer(fleet: Fleet) -> None:
    peer = fleet.start()
    for number, (name, post) in enumerate(wrong_posts().items()):
        a, b = pair(peer, f"{number:032x}")
        b.send(post)
        assert b.expect(ranks.Error).code == "WireError", name
        assert a.expect(ranks.Failed).code == "RankLost", name
    a, b = pair(peer)
    a.post(1, SUM4, ones(1))
    b.post(1, SUM4, ones(1))
    assert bytes(b.expect(ranks.Result).payload) == ones(2)


def test_one_rank_twice_is_refused(fleet: Fleet) -> None:
    peer = fleet.start()
    first, second = peer.local(), peer.local()
    first.join(0, [first.welcome.who] * 2)
    first.peek()  # its answer comes after the join was taken in
    second.join(0, [first.welcome.who] * 2)
    failed = second.expect(ranks.Failed)
    assert (failed.code, failed.seq) == ("DuplicateIdentity", 0)
    assert f"process {os.getpid()}" in failed.text


def test_a_lease_that_is_too_large_is_refused_with_numbers(fleet: Fleet) -> None:
    peer = fleet.start(config='arena_bytes = "16MiB"')
    with peer.local() as local:
        local.send(ranks.encode_lease(9, 1 << 30))
        error = local.expect(ranks.Error)
        assert (error.code, error.req) == ("StoreFull", 9)
        assert str(1 << 30) in error.text


def test_a_process_that_never_reads_does_not_stop_the_others(fleet: Fleet) -> None:
    peer = fleet.start()
    deaf = peer.local()
    for _ in range(20_000):
        try:
            deaf.sock.send(ranks.encode_json(ranks.Peek())[0], 0x40)
        except BlockingIOError:
            break
    a, b = pair(peer)
    a.post(1, SUM4, ones(1))
    b.post(1, SUM4, ones(2))
    assert bytes(a.expect(ranks.Result).payload) == ones(3)
    deaf.close()


def test_explain_says_who_is_missing(fleet: Fleet) -> None:
    a, _ = pair(fleet.start())
    a.post(1, SUM4, ones(1))
    a.send(ranks.encode_explain(1, 1))
    assert "rank 1 alive, not arrived" in a.expect(ranks.Explained).text


def test_ranks_hear_that_the_peer_stops(fleet: Fleet) -> None:
    peer = fleet.start(name="alpha")
    a, _ = pair(peer)
    a.post(1, SUM4, ones(1))
    assert peer.stop() == 0
    failed = a.expect(ranks.Failed)
    assert failed.code == "PeerUnreachable"
    assert "alpha stops: SIGTERM" in failed.text
