"""Roots depend on every digest, their order and number; manifests say which chunks differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frogzmq.content.chunks import bounds, digest_chunk
from frogzmq.content.manifest import FANOUT, Manifest, root_of
from frogzmq.errors import WireError
from frogzmq.types import Digest

GOLDEN = {
    0: "84be1f6839a550f61560866560316d83b6daee54289bec9d9b6e66c55822f178",
    2: "9bdffb7942a103be426c8dbef562e07cf23a9fa8ad0e1b395995fe7e8cf8592b",
    FANOUT + 1: "58002c440d0f52ec3364c43bdbdbead633aff592ad5855c3028a5ca3de2d63c1",
}
"""Root of the digests of b"0", b"1", ... by how many."""

digests = st.lists(st.binary(min_size=32, max_size=32).map(Digest), max_size=40)


def numbered(count: int) -> list[Digest]:
    return [digest_chunk(str(i).encode()) for i in range(count)]


@pytest.mark.parametrize("count", GOLDEN)
def test_golden_roots(count):
    """These are on the wire: a change is a new protocol version."""
    assert root_of(numbered(count)).hex() == GOLDEN[count]


@given(digests, digests)
def test_roots_are_equal_exactly_when_lists_are(first, second):
    assert (root_of(first) == root_of(second)) == (first == second)
    assert root_of(first) == root_of(tuple(first))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([FANOUT - 1, FANOUT, FANOUT + 1, 2 * FANOUT, 3 * FANOUT + 7]), st.integers(0, 1 << 20))
def test_nested_roots_notice_change_removal_and_swap(count, place):
    row = numbered(count)
    root, place = root_of(row), place % (count - 1)
    changed = [*row[:place], digest_chunk(b"other"), *row[place + 1 :]]
    swapped = [*row[:place], row[place + 1], row[place], *row[place + 2 :]]
    assert len({root, root_of(changed), root_of(swapped), root_of(row[:-1]), root_of([*row, row[-1]])}) == 5


def test_a_node_cannot_pass_for_a_list():
    row = numbered(FANOUT + 1)
    assert root_of(row) != root_of([root_of(row[:FANOUT]), root_of(row[FANOUT:])])
    assert root_of(row[:1]) != row[0]
    assert root_of([root_of(row[:1])]) != root_of(row[:1])


def test_digest_of_wrong_length_is_named():
    with pytest.raises(WireError, match="digest 1 .* 31 bytes"):
        root_of([Digest(bytes(32)), Digest(bytes(31))])


@given(st.binary(max_size=400), st.integers(1, 64))
def test_manifest_names_its_chunks(data, chunk):
    ranges = list(bounds(len(data), chunk))
    manifest = Manifest.of(data, ranges)
    assert manifest.digests == tuple(digest_chunk(data[a:b]) for a, b in ranges)
    assert manifest.root == root_of(manifest.digests)
    assert manifest.broken(np.frombuffer(data, np.uint8), ranges) == ()


@given(st.binary(min_size=1, max_size=400), st.integers(1, 64), st.integers(0, 1 << 20))
def test_a_damaged_chunk_is_found(data, chunk, place):
    ranges = list(bounds(len(data), chunk))
    wrong = bytearray(data)
    wrong[place % len(data)] ^= 1
    hit = (place % len(data)) // chunk
    good, bad = Manifest.of(data, ranges), Manifest.of(bytes(wrong), ranges)
    assert good.broken(wrong, ranges) == (hit,)
    assert good.diff(bad) == (hit,)
    assert good.root != bad.root


def test_diff_counts_missing_chunks():
    row = tuple(numbered(5))
    assert Manifest(row).diff(Manifest(row[:3])) == (3, 4)
    assert Manifest(row[:3]).diff(Manifest(row)) == (3, 4)
    assert Manifest(row).diff(Manifest(row)) == ()
    with pytest.raises(WireError, match="5 chunks for bytes cut in 1"):
        Manifest(row).broken(b"x", [(0, 1)])


def test_default_cut_and_no_bytes():
    assert Manifest.of(b"").digests == (digest_chunk(b""),)
    assert len(Manifest.of(np.zeros((1 << 20) + 1, np.uint8)).digests) == 2
