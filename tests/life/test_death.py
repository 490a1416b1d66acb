"""A rank is killed: the others are told within seconds, by name, whatever the operations' timeout is.

Three ranks on two machines; rank 1 is a process, the survivors are threads.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.fleet import PeerProcess
from support.light import LightJob, LightRank, repeated

LIMIT_S = 10.0


def between_ops(me: LightRank) -> tuple[str, str, float]:
    group = me.join()
    for i in range(5):
        data = np.full(1000, me.rank + i, np.float32)
        me.all_reduce(group, data).wait()
        assert (data == sum(range(me.size)) + me.size * i).all()
    me.say("idle")
    me.pause()

    def next_op() -> None:
        me.all_reduce(group, np.ones(1000, np.float32)).wait()

    error = me.error_of(next_op)
    assert me.error_of(next_op)[:2] == error[:2]
    return error


def in_the_middle(me: LightRank, nbytes: int) -> tuple[str, str, float]:
    group = me.join()
    me.barrier(group)
    data = np.ones(nbytes // 4, np.float32)
    if me.rank == 1:
        # It stops when the first 4 MiB are handed over: the others have folded what there is.
        send = me.client.connection.send

        def stop_after_the_first(datagram: bytes) -> None:
            send(datagram)
            if datagram[0] == 4:  # POST
                me.say("posted")
                me.pause()

        me.client.connection.send = stop_after_the_first
    else:
        me.say("posted")
    return me.error_of(lambda: me.all_reduce(group, data).wait())


def while_running(me: LightRank, nbytes: int) -> tuple[str, str, float]:
    group = me.join()
    me.say("running")

    def for_ever() -> None:
        for i in range(1_000_000):
            data = np.full(nbytes // 4, i, np.float32)
            me.all_reduce(group, data).wait()
            assert data[0] == data[-1] == data[nbytes // 8] == i * me.size

    return me.error_of(for_ever)


def before_first_use(me: LightRank) -> tuple[str, str, float]:
    group = me.join()
    me.barrier(group)
    sub = me.join("second")
    me.say("idle")
    me.pause()
    return me.error_of(lambda: me.all_reduce(sub, np.ones(10, np.float32)).wait())


def while_a_group_forms(me: LightRank) -> tuple[str, str, float]:
    me.barrier(me.join())
    me.say("idle")
    if me.rank == 1:
        me.pause()
    return me.error_of(lambda: me.join("second"))


def check(ranks: list[Any], killed: float) -> None:
    """Both survivors raised in time, naming the dead rank and its process."""
    for rank in (ranks[0], ranks[2]):
        kind, text, at = rank.finish(LIMIT_S + 5)
        assert kind == "RankLost"
        assert "rank 1" in text
        assert str(ranks[1].pid) in text
        assert at - killed < LIMIT_S


@repeated(20)
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_c017_killed_between_ops(job: LightJob, peers: list[PeerProcess], pause: float, run: int) -> None:
    ranks = job.start(between_ops, 3, peers, processes={1})
    for rank in ranks:
        rank.expect("idle")
    killed = ranks[1].kill()
    time.sleep(pause)
    ranks[0].go()
    ranks[2].go()
    check(ranks, killed)


@repeated(20)
def test_c017_killed_in_the_middle_of_an_op(job: LightJob, peers: list[PeerProcess], run: int) -> None:
    ranks = job.start(in_the_middle, 3, peers, 32 << 20, processes={1})
    for rank in ranks:
        rank.expect("posted")
    time.sleep(0.3)
    check(ranks, ranks[1].kill())


@repeated(20, 3)
def test_c017_killed_at_any_time(job: LightJob, peers: list[PeerProcess], run: int) -> None:
    ranks = job.start(while_running, 3, peers, [16 << 20, 1 << 20, 4096][run % 3], processes={1})
    for rank in ranks:
        rank.expect("running")
    time.sleep(0.05 + 0.11 * (run % 7))
    check(ranks, ranks[1].kill())


@repeated(20)
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_c017_killed_before_a_groups_first_use(
    job: LightJob, peers: list[PeerProcess], pause: float, run: int
) -> None:
    ranks = job.start(before_first_use, 3, peers, processes={1})
    for rank in ranks:
        rank.expect("idle")
    killed = ranks[1].kill()
    time.sleep(pause)
    ranks[0].go()
    ranks[2].go()
    check(ranks, killed)


@repeated(20)
def test_c017_killed_while_a_group_forms(job: LightJob, peers: list[PeerProcess], run: int) -> None:
    ranks = job.start(while_a_group_forms, 3, peers, processes={1})
    for rank in ranks:
        rank.expect("idle")
    time.sleep(0.3)
    check(ranks, ranks[1].kill())
