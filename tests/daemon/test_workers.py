"""The worker pool: order, outcomes, errors, end."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from frogzmq.daemon.workers import Outcome, Workers

WAIT_S = 10.0


def collect(workers: Workers, count: int) -> list[Outcome]:
    """Wait for ``count`` outcomes as the loop does: by the descriptor."""
    poller = select.poll()
    poller.register(workers.fd, select.POLLIN)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        assert poller.poll(WAIT_S * 1000), f"only {len(outcomes)} of {count} outcomes came"
        outcomes += workers.finished()
    return outcomes


@pytest.fixture
def single() -> Iterator[Workers]:
    """A pool of one thread."""
    workers = Workers(1)
    yield workers
    assert workers.close()


def test_every_task_has_one_outcome() -> None:
    workers = Workers(3)
    for number in range(200):
        workers.submit(number % 7, number, lambda n=number: n * n)
    outcomes = collect(workers, 200)
    assert sorted(o.tag for o in outcomes) == list(range(200))
    assert all(o.value == o.tag**2 and o.error is None for o in outcomes)
    assert workers.finished() == []
    assert workers.close()


def test_lower_numbers_go_first_and_equal_ones_in_order(single: Workers) -> None:
    gate = threading.Event()
    single.submit(0, "first", gate.wait)
    while single.waiting:
        pass
    for priority, tag in [(5, "e"), (2, "b"), (5, "f"), (1, "a"), (2, "c")]:
        single.submit(priority, tag, lambda: None)
    gate.set()
    assert [o.tag for o in collect(single, 6)] == ["first", "a", "b", "c", "e", "f"]


def test_what_a_task_raises_is_its_outcome_and_the_thread_goes_on(single: Workers) -> None:
    single.submit(1, "bad", lambda: 1 // 0)
    single.submit(2, "good", lambda: 7)
    bad, good = collect(single, 2)
    assert isinstance(bad.error, ZeroDivisionError)
    assert (good.value, good.error) == (7, None)


def test_close_drops_what_waits_and_tells_of_a_task_that_hangs() -> None:
    gate = threading.Event()
    workers = Workers(1)
    ran: list[int] = []
    workers.submit(0, 0, gate.wait)
    while workers.waiting:
        pass
    workers.submit(1, 1, lambda: ran.append(1))
    assert not workers.close(0.1)
    gate.set()
    assert workers.close(WAIT_S)
    assert ran == []
