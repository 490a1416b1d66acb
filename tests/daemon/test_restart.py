"""A peer that is killed and comes back takes its place again; a second one with its key is refused."""

from __future__ import annotations

import shutil
import signal
import time
from typing import Any

import numpy as np
import pytest
from support.fabrics import ZmqFabric
from support.fleet import Fleet, PeerProcess

from frogzmq.descriptor import Descriptor
from frogzmq.types import Mode, OpKind, Order, ReduceOp

SUM = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (100_000,))
BOTH_WAYS_S = 5.0


def row_of(snapshot: dict[str, Any], other: PeerProcess | dict[str, Any]) -> dict[str, Any]:
    """What a peer says of another one, whose own snapshot is given; empty where it does not know it."""
    me = other["me"]
    rows = [row for row in snapshot["peers"] if row["peer"] == me["peer"]]
    return rows[0] if rows else {}


def in_touch(a: PeerProcess, b: PeerProcess) -> bool:
    """Whether each has the other's present instance and has had an answer from it (a round trip)."""
    seen = a.peek(), b.peek()
    rows = row_of(seen[0], seen[1]), row_of(seen[1], seen[0])
    return all(
        row.get("state") == "up" and row["instance"] == other["me"]["instance"] and row["rtt_s"] is not None
        for row, other in zip(rows, reversed(seen), strict=True)
    )


def wait_in_touch(a: PeerProcess, b: PeerProcess, seconds: float, logs: str = "") -> float:
    started = time.monotonic()
    while not in_touch(a, b):
        waited = time.monotonic() - started
        assert waited < seconds, f"after {waited:.1f} s\n{a.peek()['peers']}\n{b.peek()['peers']}\n{a.text()}"
        time.sleep(0.02)
    return time.monotonic() - started


def run_job(a: PeerProcess, b: PeerProcess) -> None:
    """A new group of a rank on each: one exact all_reduce."""
    fabric = ZmqFabric([0, 1], Mode.AUTO, Order.MACHINE, [a, b])
    try:
        data = [np.full(100_000, value, np.float32).tobytes() for value in (1, 2)]
        assert fabric.run([(SUM, mine) for mine in data]) == [np.full(100_000, 3, np.float32).tobytes()] * 2
    finally:
        fabric.close()


@pytest.mark.timeout(400)
def test_a_restarted_peer_takes_over_at_once(fleet: Fleet, pytestconfig: pytest.Config) -> None:
    rounds = 20 if pytestconfig.getoption("--repeats") else 2
    a = fleet.start(name="a")
    seeds = f'peers = ["{a.peek()["me"]["local_endpoint"]}"]'
    b = fleet.start(name="b", config=seeds)
    wait_in_touch(a, b, 15)
    run_job(a, b)
    for number in range(rounds):
        stopped = number % 2 == 1
        begin = time.monotonic()
        if stopped:
            a.process.send_signal(signal.SIGSTOP)
        try:
            b.process.kill()
            b.process.wait()
            killed = time.monotonic()
            time.sleep(0.3)
            b = fleet.start(name="b", config=seeds, runtime_dir=b.runtime_dir)
            started = time.monotonic()
            if stopped:
                time.sleep(max(0.0, begin + 3.0 - time.monotonic()))
        finally:
            if stopped:
                a.process.send_signal(signal.SIGCONT)
        took = wait_in_touch(a, b, BOTH_WAYS_S)
        print(f"round {number}: ready {started - killed:.2f} s after the kill, both ways {took:.2f} s later")
    run_job(a, b)


def test_a_job_finds_a_peer_that_restarted_though_nothing_is_configured(fleet: Fleet) -> None:
    a, b = fleet.start(name="a"), fleet.start(name="b")
    for _ in range(2):
        run_job(a, b)
        b.process.kill()
        b.process.wait()
        b = fleet.start(name="b", runtime_dir=b.runtime_dir)
    run_job(a, b)


def test_a_second_living_peer_with_one_key_is_refused_on_the_newcomer(fleet: Fleet) -> None:
    a = fleet.start(name="a")
    seeds = f'peers = ["{a.peek()["me"]["local_endpoint"]}"]'
    b = fleet.start(name="b", config=seeds)
    wait_in_touch(a, b, 15)
    copy = fleet.folder / "copy"
    copy.mkdir(mode=0o700)
    shutil.copytree(b.runtime_dir / "keys", copy / "keys")
    second = fleet.start(name="b2", config=seeds, runtime_dir=copy, ready=False)
    second.wait_ready()
    assert second.wait(BOTH_WAYS_S) == 1
    assert "two running peers have the identity" in second.text()
    assert in_touch(a, b), "the first one must not notice"


def test_a_job_meets_a_second_living_peer_with_one_key(fleet: Fleet) -> None:
    a, b = fleet.start(name="a"), fleet.start(name="b")
    run_job(a, b)
    copy = fleet.folder / "copy"
    copy.mkdir(mode=0o700)
    shutil.copytree(b.runtime_dir / "keys", copy / "keys")
    second = fleet.start(name="b2", runtime_dir=copy)
    both = a.local(), second.local()
    for rank, local in enumerate(both):
        local.join(rank, [local.welcome.who for local in both])
    assert second.wait(BOTH_WAYS_S) == 1
    assert "two running peers have the identity" in second.text()
    run_job(a, b)
