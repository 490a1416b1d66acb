"""Messages between ranks without torch, over real peers: order, tags, sizes, many at once, endings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleet import Fleet
from support.light import LightJob, LightRank

from frogzmq.client.letters import ANY_RANK


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("mail")) as fleet:
        fleet.start()
        fleet.start()
        yield fleet


@pytest.fixture(params=[1, 2], ids=["one peer", "two peers"])
def peers(request: pytest.FixtureRequest, fleet: Fleet) -> list[Any]:
    return fleet.peers[: request.param]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LightJob]:
    with LightJob(tmp_path) as job:
        yield job


def test_sizes(job: LightJob, peers: list[Any]) -> None:
    def rank(me: LightRank) -> None:
        group = me.join(timeout_s=30)
        for size in (0, 4, 32768, 32769, 5_000_000, 64 << 20):
            data = np.arange(size, dtype=np.uint64).astype(np.uint8)
            if me.rank == 0:
                group.mail.send(1, 7, "uint8", data).wait()
            else:
                sink = np.zeros(size, np.uint8)
                group.mail.receive(0, 7, "uint8", [sink]).wait()
                assert (sink == data).all()
        group.close()

    ranks = job.start(rank, 2, peers)
    for one in ranks:
        one.finish(60)


def test_order_tags_and_any_source(job: LightJob, peers: list[Any]) -> None:
    def rank(me: LightRank) -> None:
        group = me.join(timeout_s=30)
        rng = np.random.default_rng(1)
        sizes = rng.integers(0, 100_000, 100)
        if me.rank == 0:
            sinks = [np.zeros(size, np.uint8) for size in sizes]
            late = [group.mail.receive(1, 1, "uint8", [sink]) for sink in sinks]
            first = np.zeros(4, np.uint8)
            group.mail.receive(1, 2, "uint8", [first]).wait()
            assert (first == 2).all()
            for number, (message, sink) in enumerate(zip(late, sinks, strict=True)):
                message.wait()
                assert (sink == number).all()
            seen = []
            for _ in range(2 * (me.size - 1)):
                sink = np.zeros(8, np.uint8)
                message = group.mail.receive(ANY_RANK, 3, "uint8", [sink])
                message.wait()
                assert (sink == message.source).all()
                seen.append(message.source)
            assert sorted(seen) == sorted([*range(1, me.size)] * 2)
        else:
            if me.rank == 1:
                sent = [
                    group.mail.send(0, 1, "uint8", np.full(size, n, np.uint8)) for n, size in enumerate(sizes)
                ]
                group.mail.send(0, 2, "uint8", np.full(4, 2, np.uint8)).wait()
                for message in sent:
                    message.wait()
            for _ in range(2):
                group.mail.send(0, 3, "uint8", np.full(8, me.rank, np.uint8)).wait()
        group.close()

    ranks = job.start(rank, 4, peers)
    for one in ranks:
        one.finish(60)
