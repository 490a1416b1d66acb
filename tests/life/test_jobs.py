"""Jobs beside each other, many threads, many ops: exact, and nothing stays in the peers that they share."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
from support.fleet import PeerProcess
from support.leftovers import is_idle
from support.light import LightJob, LightRank, repeated

FLAT_BYTES = 3 << 20
"""How much a peer's memory may move while nothing but small ops happens (allocators round)."""


def many_ops(me: LightRank, count: int, nbytes: int, base: int) -> int:
    group = me.join()
    for i in range(count):
        data = np.full(nbytes // 4, base + i + me.rank, np.float32)
        me.all_reduce(group, data).wait()
        want = me.size * (base + i) + sum(range(me.size))
        assert (data == want).all(), (i, data[0], want)
        me.say(f"op {i}.")
    group.close()
    return count


@repeated(3)
def test_c005_one_of_two_jobs_is_killed(
    job: LightJob, peers: list[PeerProcess], caplog: pytest.LogCaptureFixture, run: int,
    pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    full = pytestconfig.getoption("--repeats")
    count, nbytes = (200, 10_000_000) if full else (40, 2_000_000)
    with caplog.at_level(logging.WARNING, logger="frogzmq"):
        doomed = job.start(many_ops, 2, peers, 1 << 30, nbytes, 1000, processes={0, 1})
        other = job.start(many_ops, 2, peers, count, nbytes, 0)
        other[0].expect(f"op {count // 4}.", 60)
        doomed[0].expect("op 1.", 60)
        doomed[run % 2].kill()
        killed = time.monotonic()
        assert doomed[1 - run % 2].code(10) == 1
        assert time.monotonic() - killed < 10
        assert [rank.finish(100) for rank in other] == [count, count]
    assert "RankLost" in doomed[1 - run % 2].stderr
    assert not caplog.records, caplog.text


def test_c005_one_job_ends_the_other_goes_on(job: LightJob, peers: list[PeerProcess]) -> None:
    long = job.start(many_ops, 2, peers, 60, 100_000, 7)
    short = job.start(many_ops, 2, peers, 5, 100_000, 70)
    assert [rank.finish() for rank in short] == [5, 5]
    assert [rank.finish() for rank in long] == [60, 60]


def threads_with_groups(me: LightRank, ops: int, churns: int) -> int:
    from concurrent.futures import ThreadPoolExecutor

    sizes = [1, 1000, 3, 9000, 100, 50_000, 0, 300_000]

    def work(number: int) -> int:
        group = me.join(f"thread {number}")
        for i in range(ops):
            data = np.full(sizes[(i + number) % len(sizes)], number + i + me.rank, np.float32)
            me.all_reduce(group, data).wait()
            assert (data == me.size * (number + i) + sum(range(me.size))).all(), (number, i)
        me.barrier(group)
        group.close()
        return ops

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work, number) for number in range(8)]
        for i in range(churns):
            group = me.join(f"ninth {i}")
            data = np.full(100, float(i), np.float32)
            op = me.all_reduce(group, data)
            if i % 2:
                op.wait()
                assert (data == me.size * i).all()
            group.close()
        return sum(future.result() for future in futures)


@repeated(3)
@pytest.mark.parametrize("machines", [1, 2])
def test_c054_eight_threads_with_their_own_groups(
    job: LightJob, peers: list[PeerProcess], machines: int, run: int, pytestconfig: pytest.Config
) -> None:
    ops, churns = (1000, 100) if pytestconfig.getoption("--repeats") else (25, 10)
    ranks = job.start(threads_with_groups, 2, peers[:machines], ops, churns, processes={1})
    assert [rank.finish(110) for rank in ranks] == [8 * ops, 8 * ops]


def small_ops(me: LightRank, first: int, then: int) -> None:
    group = me.join()
    data = np.ones(16, np.float32)
    for count in (first, then):
        for _ in range(count):
            me.all_reduce(group, data).wait()
            data[:] = 1
        me.say("done")
        me.pause()
    group.close()


@pytest.mark.parametrize(("machines", "then"), [(1, 10_000), (2, 1_500)])
def test_memory_is_flat_over_thousands_of_small_ops(
    job: LightJob, peers: list[PeerProcess], machines: int, then: int
) -> None:
    ranks = job.start(small_ops, 2, peers[:machines], 1500, then, processes={0, 1})
    sizes = []
    for _ in range(2):
        for rank in ranks:
            rank.expect("done", 100)
        sizes.append([p["rss_bytes"] - p["shared_bytes"] for p in (peer.peek()["process"] for peer in peers)])
        for rank in ranks:
            rank.go()
    for rank in ranks:
        rank.finish()
    assert all(after - before < FLAT_BYTES for before, after in zip(*sizes, strict=True)), sizes


def start_and_vanish(me: LightRank) -> None:
    group = me.join()
    ops = [me.all_reduce(group, np.ones(400_000, np.float32)) for _ in range(4)]
    ops[0].wait()
    me.say("posted")
    me.pause()


def test_many_short_jobs_leave_memory_and_descriptors_flat(job: LightJob, peers: list[PeerProcess]) -> None:
    seen = []
    for _ in range(3):
        ranks = job.start(start_and_vanish, 2, peers, processes={0})
        for rank in ranks:
            rank.expect("posted")
        ranks[0].kill()
        ranks[1].go()
        ranks[1].finish()
        ranks[1].close()
        facts = [peer.wait_for(is_idle)["process"] for peer in peers]
        seen.append([(fact["descriptors"], fact["threads"]) for fact in facts])
        assert threading.active_count() < 20
    # The first may open connections between the peers, which then stay.
    assert seen[1] == seen[2], seen
