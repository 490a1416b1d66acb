"""Chunk digests: stable, separate from every other digest, and refused when bytes differ."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.content.chunks import CHUNK_BYTES, bounds, digest_chunk, matches, verify
from frogzmq.errors import IntegrityError
from frogzmq.types import Digest

GOLDEN = {
    b"": "c05c2bf7c7193a356c65f828daa1cd913321e60776621d1f5d50aa1086b498f0",
    b"frog": "0d818c54640ccbe06bbf5155dc69be21ff5fe9efe6b124e70f87880036e0fdb2",
}


@pytest.mark.parametrize("data", GOLDEN)
def test_golden_digests(data):
    """These are on the wire: a change is a new protocol version."""
    assert digest_chunk(data).hex() == GOLDEN[data]


@given(st.binary(max_size=300))
def test_any_buffer_gives_the_digest_of_its_bytes(data):
    expected = blake3(data, derive_key_context="frogzmq 2026 v1 chunk").digest()
    assert digest_chunk(data) == expected
    assert digest_chunk(memoryview(bytearray(data))) == expected
    assert digest_chunk(np.frombuffer(data, np.uint8)) == expected
    assert expected != blake3(data).digest(), "another context, another digest"


@given(st.binary(min_size=1, max_size=200), st.integers(0, 1 << 20))
def test_one_flipped_bit_is_refused(data, place):
    digest = digest_chunk(data)
    verify(data, digest)
    wrong = bytearray(data)
    wrong[place % len(data)] ^= 1 << place % 8
    assert not matches(wrong, digest)
    with pytest.raises(IntegrityError, match=f"part 3: {len(data)} bytes"):
        verify(np.frombuffer(bytes(wrong), np.uint8), digest, "part 3")


def test_another_length_is_refused():
    digest = digest_chunk(bytes(64))
    assert not matches(bytes(65), digest)
    assert not matches(bytes(64), Digest(digest[:16]))


@given(st.integers(0, 5000), st.integers(1, 700))
def test_bounds_cover_all_bytes_once(nbytes, chunk):
    ranges = list(bounds(nbytes, chunk))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(stop - start <= chunk for start, stop in ranges)
    assert all(stop > start for start, stop in ranges) or nbytes == 0


def test_bounds_default_and_bad_size():
    assert list(bounds(CHUNK_BYTES + 1)) == [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES + 1)]
    with pytest.raises(ValueError, match="chunk_bytes is 0"):
        list(bounds(10, 0))
