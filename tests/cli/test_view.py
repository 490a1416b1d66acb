from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.peek_samples import full_snapshot

from frogzmq.cli import view


def drawn(snapshot: dict[str, Any], width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view.render(snapshot))
    return out.getvalue()


def test_the_view_shows_what_there_is_to_know() -> None:
    text = drawn(full_snapshot())
    for part in [
        "peer alpha", "pid 4242", "up 3m 12s", "50.0 MiB resident", "tcp://192.0.2.1:29650",  # the peer
        "beta", "31ms", "3.0 MiB", "400ms ago",  # a machine and its path
        "silent for 10 s", "tcp://192.0.2.3:1: refused",  # why another one is down
        "group default of job run-7: 4 ranks", "mode auto", "order machine", "118 ops done", "running",
        "alpha 0-1 · beta 2-3", "all_reduce(SUM) of float32[1000]", "3/8", "0-1,3",
        "done 118 barrier", "64.0 MiB leased, 128.0 MiB used of at most 8.0 GiB in /dev/shm/frogzmq-1",
        "send to 3", "17", "5.0 MiB", "bfloat16", "recv from any rank",  # messages that wait
        "fallback", "chunks sent 17", "chunk bytes sent 1.0 MiB", "rejected by peer b 2",
    ]:  # fmt: skip
        assert part in text, part
    assert "drops" not in text


def test_a_far_contribution_that_came_first_stands_first() -> None:
    assert "2-3 beta +2.10ms > 0-1 here +31ms" in drawn(full_snapshot())


def test_a_peer_without_anything_says_so() -> None:
    text = drawn({"me": {"name": "lonely"}, "peers": [], "groups": [], "counters": {"drops": 0}})
    for part in ["peer lonely", "no other peer known", "no job on this machine", "counters: all zero"]:
        assert part in text


def test_what_is_said_under_peer_is_shown_too() -> None:
    text = drawn({"peer": {"id": "d" * 16, "name": "delta", "pid": 7, "runtime_dir": "/run/frogzmq"}})
    assert "peer delta" in text
    assert "runtime dir /run/frogzmq" in text


def test_long_lists_are_cut_and_counted() -> None:
    snapshot = full_snapshot()
    group = snapshot["groups"][0]
    snapshot["peers"] = [snapshot["peers"][0]] * (view.MAX_PEERS + 5)
    group["ops"] = [group["ops"][0]] * 30
    group["ops_in_flight"] = 64
    snapshot["groups"] = [group] * (view.MAX_GROUPS + 2)
    text = drawn(snapshot)
    assert "and 5 more" in text
    assert f"and {64 - view.MAX_OPS} more in flight" in text
    assert "and 2 more groups" in text


def test_names_are_shown_as_they_are_not_as_markup() -> None:
    snapshot = full_snapshot()
    snapshot["peers"][0]["name"] = "[red]x[/red]"
    snapshot["groups"][0]["job"] = "[/bold]"
    text = drawn(snapshot)
    assert "[red]x[/red]" in text
    assert "[/bold]" in text


def _removals(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in items for found in ((*path, key), *_removals(child, (*path, key)))]


@pytest.mark.parametrize("path", _removals(full_snapshot()), ids=lambda path: ".".join(map(str, path)))
def test_any_key_may_be_missing(path: tuple[Any, ...]) -> None:
    snapshot = full_snapshot()
    holder: Any = snapshot
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    assert "counters" in drawn(snapshot)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 400))
def test_every_width_can_be_drawn_on(width: int) -> None:
    assert drawn(full_snapshot(), max(width, 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.00035, "0.35ms"), (0.031, "31ms"), (2.44, "2.4s"), (192, "3m 12s"), (18180, "5h 03m")],
)
def test_durations(value: float | None, text: str) -> None:
    assert view.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes(value: int | None, text: str) -> None:
    assert view.size(value) == text
