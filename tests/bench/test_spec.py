from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.bench.spec import MAX_BLOCK, Layout, Spec, block_length, format_size, labels_of, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4", 4),
        ("4b", 4),
        ("4k", 4096),
        ("256KiB", 256 << 10),
        ("256 kb", 256 << 10),
        ("64M", 64 << 20),
        ("1g", 1 << 30),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "not understood"), ("4x", "not understood"), ("-4", "not understood"), ("3", "multiple of 4"),
     ("0", "at least 4"), ("8g", "above the limit"), ("4k,", "not understood")],
)  # fmt: skip
def test_wrong_sizes_say_why(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 1 << 30).map(lambda n: n * 4))
def test_a_size_reads_back_as_bytes(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


def test_format_size_keeps_three_digits() -> None:
    assert [format_size(n) for n in (4, 1000, 4096, 256 << 10, 6.4 * (1 << 20), 64 << 20)] == [
        "4 B", "1000 B", "4 KiB", "256 KiB", "6.4 MiB", "64 MiB",
    ]  # fmt: skip


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_layout_spreads_neighbours_evenly(ranks: int, peers: int) -> None:
    if ranks < peers:
        with pytest.raises(ValueError, match="cannot be spread"):
            Layout(ranks, peers)
        return
    layout = Layout(ranks, peers)
    hosts = [layout.host_of(rank) for rank in range(ranks)]
    assert hosts == sorted(hosts)
    counts = [hosts.count(host) for host in range(peers)]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert [rank for host in range(peers) for rank in layout.ranks_of(host)] == list(range(ranks))


def test_labels_tell_contenders_of_one_backend_apart() -> None:
    assert labels_of(("gloo", "frogzmq")) == ["gloo", "frogzmq"]
    assert labels_of(("gloo", "gloo", "gloo")) == ["gloo", "gloo#2", "gloo#3"]


def test_a_spec_survives_the_command_line() -> None:
    spec = Spec(4, 2, ("gloo", "frogzmq"), (4, 4096), 1.5, 0.2)
    assert Spec.from_text(spec.to_text()) == spec


@given(st.floats(0, 10), st.floats(0.001, 10), st.integers(1, 64))
def test_a_block_is_bounded_and_stays_finite(warm: float, budget: float, ranks: int) -> None:
    count = block_length(warm, budget, ranks)
    assert 1 <= count <= MAX_BLOCK
    # 7 * 2**-20 summed over ranks, then multiplied by the number of ranks in every iteration.
    assert count == 1 or 7 * 2.0**-20 * ranks**2 * float(ranks) ** count < 3.4e38
