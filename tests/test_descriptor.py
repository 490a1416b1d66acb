"""Descriptors: canonical bytes there and back; whatever else comes in is a WireError."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.descriptor import MAX_DESCRIPTOR_BYTES, MAX_NBYTES, SPLIT, Descriptor, decode_descriptor
from frogzmq.dtypes import DTYPES, dtype_of
from frogzmq.errors import WireError
from frogzmq.types import OpKind, ReduceOp

plain = st.builds(
    Descriptor,
    st.sampled_from(OpKind),
    st.sampled_from(ReduceOp),
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 2000), max_size=3).map(tuple),
    st.integers(-1, (1 << 16) - 1),
)


@st.composite
def uneven(draw):
    splits = tuple(draw(st.lists(st.integers(0, 2000), min_size=1, max_size=70)))
    kind = draw(st.sampled_from(SPLIT))
    return Descriptor(kind, ReduceOp.NONE, draw(st.sampled_from(list(DTYPES))), (sum(splits),), -1, splits)


descriptors = plain | uneven()
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
GOOD = Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "float32", (100, 2560))


def refused(encoded: bytes) -> bool:
    """Whether the bytes are refused; any error but WireError fails the test."""
    try:
        found = decode_descriptor(encoded)
    except WireError:
        return True
    assert found.encoded == encoded, "what is taken is canonical"
    return False


@given(descriptors)
def test_round_trip(descriptor):
    assert decode_descriptor(descriptor.encoded) == descriptor
    assert len(descriptor.encoded) <= MAX_DESCRIPTOR_BYTES
    assert descriptor.nbytes == descriptor.numel * dtype_of(descriptor.dtype).itemsize


@given(descriptors, descriptors, st.integers(1, 3), st.integers(1, 3))
def test_digests_agree_exactly_when_op_and_descriptor_do(first, second, seq, other_seq):
    same = first == second and seq == other_seq
    assert (first.digest(seq) == second.digest(other_seq)) == same


def test_golden_bytes_and_digest():
    """These are on the wire: a change is a new protocol version."""
    assert GOOD.encoded == b'[1,1,"float32",[100,2560],-1]'
    assert GOOD.digest(7).hex() == "cf65d07956250f1efd7abb478ce13a67eec10107bdef294a44209646e6c56429"


@given(st.binary(max_size=1100))
def test_random_bytes_are_refused(data):
    refused(data)


@given(json_values)
def test_random_json_is_refused(value):
    refused(json.dumps(value).encode())


@given(st.lists(json_values, min_size=5, max_size=6))
def test_five_or_six_random_fields_are_refused(fields):
    refused(json.dumps(fields, separators=(",", ":")).encode())


@given(descriptors, st.integers(0, 1 << 16), st.binary(min_size=1, max_size=2))
def test_damaged_bytes_are_refused_or_canonical(descriptor, place, junk):
    encoded = descriptor.encoded
    place %= len(encoded)
    refused(encoded[:place] + junk + encoded[place + 1 :])
    assert refused(encoded[:place]), "a cut-off descriptor"
    assert refused(encoded + junk.replace(b" ", b"x")), "something behind it"


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"null",
        b"[" * 1000,
        b" " + GOOD.encoded,
        b'[1, 1, "float32", [100], -1]',
        b'[1.0,1,"float32",[100],-1]',
        b'[true,1,"float32",[100],-1]',
        b'[99,1,"float32",[100],-1]',
        b'[1,99,"float32",[100],-1]',
        b'[1,1,"float33",[100],-1]',
        b'[1,1,["float32"],[100],-1]',
        b'[1,1,"float32",[-1],-1]',
        b'[1,1,"float32",[true],-1]',
        b'[1,1,"float32",[1e3],-1]',
        b'[1,1,"float32",100,-1]',
        b'[1,1,"float32",[100],-2]',
        b'[3,0,"float32",[100],65536]',
        b'[1,1,"float32",[100],null]',
        b'[1,1,"float32",[100],NaN]',
        b'[[],{},"float32",[100],-1]',
        b'[1,1,"\\ud800",[100],-1]',
        b"\xff\xfe[\x001\x00]\x00",
        json.dumps([1, 1, "uint8", [0] * 65, -1], separators=(",", ":")).encode(),
        json.dumps([1, 1, "uint8", [MAX_NBYTES + 1], -1], separators=(",", ":")).encode(),
        json.dumps([1, 1, "float64", [1 << 23, 1 << 23], -1], separators=(",", ":")).encode(),
        b'[4,0,"float32",[5],-1,[]]',
        b'[4,0,"float32",[5],-1,[2,2]]',
        b'[4,0,"float32",[5],-1,[6,-1]]',
        b'[4,0,"float32",[1],-1,[true]]',
        b'[4,0,"float32",[5],-1,[5],[5]]',
        b'[4,0,"float32",[5],-1,5]',
        b'[1,1,"float32",[5],-1,[5]]',
        b'[3,0,"float32",[5],0,[2,3]]',
        b'[4,0,"float32",[5],-1,[5' + b",0" * 30_000 + b"]]",
        b'[1,1,"uint8",[1' + b"0" * 1000 + b"],-1]",
        b'[1,1,"uint8",[1' + b"0" * 5000 + b"],-1]",
    ],
)
def test_garbage_gives_wire_error(encoded):
    with pytest.raises(WireError):
        decode_descriptor(encoded)


def test_the_largest_size_is_taken():
    largest = Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "uint8", (MAX_NBYTES,), 0)
    assert decode_descriptor(largest.encoded).nbytes == MAX_NBYTES


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (GOOD, "all_reduce(SUM) of float32[100, 2560]"),
        (Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "int64", (), 2), "broadcast of int64[] root 2"),
        (Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,)), "barrier"),
        (
            Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int8", (3,), -1, (1, 2)),
            "all_gather of int8[3] splits [1, 2]",
        ),
    ],
)
def test_describe(descriptor, text):
    assert descriptor.describe() == text


@given(st.sampled_from(list(DTYPES)))
def test_scalars_and_empty_tensors_have_sizes(name):
    assert Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, name, ()).numel == 1
    assert Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, name, (5, 0)).nbytes == 0


MATRIX = (1, 2, 0, 3)


@pytest.mark.parametrize(
    ("descriptor", "gives", "gets"),
    [
        (Descriptor(OpKind.ALL_REDUCE, ReduceOp.SUM, "int16", (3,)), [6, 6], [6, 6]),
        (Descriptor(OpKind.REDUCE, ReduceOp.SUM, "int16", (3,), 1), [6, 6], [-1, 6]),
        (Descriptor(OpKind.BROADCAST, ReduceOp.NONE, "int16", (3,), 1), [0, 6], [6, -1]),
        (Descriptor(OpKind.BARRIER, ReduceOp.NONE, "uint8", (0,)), [0, 0], [-1, -1]),
        (Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int16", (3,)), [6, 6], [12, 12]),
        (Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int16", (3,), -1, (3, 0)), [6, 0], [6, 6]),
        (Descriptor(OpKind.GATHER, ReduceOp.NONE, "int16", (3,), 0), [6, 6], [12, -1]),
        (Descriptor(OpKind.GATHER, ReduceOp.NONE, "int16", (3,), 0, (1, 2)), [2, 4], [6, -1]),
        (Descriptor(OpKind.SCATTER, ReduceOp.NONE, "int16", (3,), 0), [12, 0], [6, 6]),
        (Descriptor(OpKind.REDUCE_SCATTER, ReduceOp.SUM, "int16", (4,)), [8, 8], [4, 4]),
        (Descriptor(OpKind.REDUCE_SCATTER, ReduceOp.SUM, "int16", (4,), -1, (1, 3)), [8, 8], [2, 6]),
        (Descriptor(OpKind.ALL_TO_ALL, ReduceOp.NONE, "int16", (4,)), [8, 8], [8, 8]),
        (Descriptor(OpKind.ALL_TO_ALL, ReduceOp.NONE, "int16", (6,), -1, MATRIX), [6, 6], [2, 10]),
    ],
    ids=lambda value: value.describe() if isinstance(value, Descriptor) else "",
)
def test_what_each_rank_gives_and_gets(descriptor, gives, gets):
    assert not descriptor.misfit(range(2))
    assert [descriptor.gives(rank, 2) for rank in range(2)] == gives
    assert [descriptor.gets(rank, 2) for rank in range(2)] == gets
    assert [sum(descriptor.blocks(rank, 2)) for rank in range(2) if gives[rank]] == [n for n in gives if n]


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (Descriptor(OpKind.GATHER, ReduceOp.NONE, "int8", (3,), 2), r"no such root rank .*\[0, 1\]"),
        (Descriptor(OpKind.SCATTER, ReduceOp.NONE, "int8", (3,)), "no such root rank"),
        (Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int8", (3,), -1, (1, 1, 1)), "3 splits .* needs 2"),
        (Descriptor(OpKind.ALL_TO_ALL, ReduceOp.NONE, "int8", (3,), -1, (1, 2)), "2 splits .* needs 4"),
        (Descriptor(OpKind.REDUCE_SCATTER, ReduceOp.SUM, "int8", (3,)), "3 elements .* 2 ranks; give splits"),
        (Descriptor(OpKind.ALL_TO_ALL, ReduceOp.NONE, "int8", (3,)), "cannot be dealt out evenly"),
    ],
)
def test_ops_that_no_group_of_two_can_run_say_why(descriptor, text):
    assert re.search(text, descriptor.misfit(range(2)))


def test_long_splits_are_described_briefly_and_told_apart():
    first = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int8", (400,), -1, (1,) * 400)
    other = Descriptor(OpKind.ALL_GATHER, ReduceOp.NONE, "int8", (400,), -1, (*(1,) * 398, 2, 0))
    assert len(first.describe()) < 200
    assert first.describe() != other.describe()
