"""Which members of a forming group are given up because their process has ended."""

from __future__ import annotations

from frogzmq.daemon.absent import MAX_ENDED, Absent
from frogzmq.types import GroupId

A, B = GroupId(b"a" * 16), GroupId(b"b" * 16)


def test_a_process_that_ends_gives_up_every_seat_it_was_awaited_for() -> None:
    absent = Absent()
    absent.came(7)
    assert absent.awaits(A, [(1, 7), (2, 8)]) == []
    assert absent.awaits(B, [(0, 7)]) == []
    assert absent.ended(7, "killed") == [(A, 1), (B, 0)]
    assert absent.ended(7, "killed") == []


def test_a_seat_that_is_taken_is_not_given_up() -> None:
    absent = Absent()
    absent.awaits(A, [(1, 7)])
    absent.seated(A, 1, 7)
    assert absent.ended(7, "killed") == []


def test_a_group_that_lists_a_process_that_has_ended_is_told_why() -> None:
    absent = Absent()
    absent.came(7)
    absent.ended(7, "killed")
    assert absent.awaits(A, [(1, 7), (2, 8)]) == [(1, "killed")]


def test_a_process_that_was_never_seen_may_still_come() -> None:
    assert Absent().awaits(A, [(1, 7)]) == []


def test_a_number_that_comes_again_is_another_process() -> None:
    absent = Absent()
    absent.ended(7, "killed")
    absent.came(7)
    assert absent.awaits(A, [(1, 7)]) == []


def test_what_is_remembered_is_bounded() -> None:
    absent = Absent()
    for pid in range(MAX_ENDED + 10):
        absent.ended(pid, "killed")
    assert absent.awaits(A, [(1, 0)]) == []
    assert absent.awaits(A, [(1, MAX_ENDED)]) == [(1, "killed")]
