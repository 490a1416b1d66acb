"""The local socket's datagrams: round trips, refusals by name, split JSON, bounds."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import wire_strategies as ws
from support.wire_samples import DESCRIPTOR, PAYLOAD, RANKS, encode_datagrams

from frogzmq import descriptor
from frogzmq.errors import VersionMismatch, WireError
from frogzmq.wire import limits, ranks
from frogzmq.wire.messages import PROTOCOL, JoinGroup

N = len(PAYLOAD)
F, D, L = ranks.INLINE, ranks.NODATA, ranks.FINAL
HUGE = limits.TENSOR_BYTES + 1
BEYOND = 1 << 63


@given(ws.BINARIES)
def test_binary_round_trip(message: ranks.Datagram) -> None:
    [datagram] = encode_datagrams(message)
    assert len(datagram) <= limits.DATAGRAM_BYTES
    for buffer in (datagram, bytearray(datagram), memoryview(datagram)):
        decoded = ranks.decode(buffer)
        assert decoded == message
        assert type(decoded) is type(message)


@given(ws.RANK_JSON)
def test_json_round_trip(message: ranks.Json) -> None:
    assembler = ranks.Assembler()
    *first, last = ranks.encode_json(message)
    assert all(len(datagram) <= limits.DATAGRAM_BYTES for datagram in (*first, last))
    assert [assembler.feed(datagram) for datagram in first] == [None] * len(first)
    decoded = assembler.feed(last)
    assert decoded == message
    assert type(decoded) is type(message)


def test_an_inline_payload_is_a_view_of_the_datagram() -> None:
    datagram = bytearray(ranks.encode_post(1, 1, F, 0, 0, N, N, DESCRIPTOR, PAYLOAD))
    post = ranks.decode(datagram)
    assert isinstance(post, ranks.Post)
    datagram[-1] ^= 0xFF
    assert post.payload[-1] == PAYLOAD[-1] ^ 0xFF


def test_heads_and_payloads_can_be_sent_apart() -> None:
    assert ranks.encode_post(1, 1, F, 0, 0, N, N, DESCRIPTOR) + PAYLOAD == ranks.encode_post(
        1, 1, F, 0, 0, N, N, DESCRIPTOR, PAYLOAD
    )
    assert ranks.encode_result(1, 1, F | L, 0, 0, N, N) + PAYLOAD == ranks.encode_result(
        1, 1, F | L, 0, 0, N, N, PAYLOAD
    )


def test_the_largest_post_and_result_fit() -> None:
    size = limits.INLINE_BYTES
    room = limits.POST_ROOM - size
    post = ranks.encode_post(1, 1, F, 0, 0, size, size, bytes(room), bytes(size))
    result = ranks.encode_result(1, 1, F | L, 0, 0, size, size, bytes(size))
    assert max(len(post), len(result)) <= limits.DATAGRAM_BYTES
    assert ranks.decode(post)
    assert ranks.decode(result)


@pytest.mark.parametrize(
    ("datagram", "complaint"),
    [
        (b"", "datagram of 0 bytes"),
        (bytes(limits.DATAGRAM_BYTES + 1), "allowed are 1 to 65536"),
        (b"\x00", "unknown datagram kind 0"),
        (b"\xff\x00{}", "unknown datagram kind 255"),
        (b"\x04", "kind 4 has 1 bytes, its struct 42"),
        (ranks.encode_ready(1, 1, 1) + b"x", "kind 5 has 22 bytes, its struct 21"),
        (ranks.encode_ready(1, 0, 1), "Ready of op 0"),
        (ranks.encode_ready(1, BEYOND, 1), "Ready of op"),
        (ranks.encode_ready(1, 1, HUGE), "sizes at most"),
        (ranks.encode_consumed(1, 0), "Consumed of op 0"),
        (ranks.encode_freed(1, BEYOND), "Freed of op"),
        (ranks.encode_explain(1, 0), "Explain of op 0"),
        (ranks.encode_lease(1, HUGE), "Lease of"),
        (ranks.encode_leased(1, 0, 0, HUGE), "Leased of"),
        (ranks.encode_leased(1, 0, BEYOND, 1), "Leased of"),
        (ranks.encode_unlease(0, BEYOND), "Unlease at"),
        (ranks.encode_post(1, 0, 0, 0, 0, 1, 1, DESCRIPTOR), "Post of op 0"),
        (ranks.encode_post(1, 1, 0, 0, 0, HUGE, 1, DESCRIPTOR), "sizes at most"),
        (ranks.encode_post(1, 1, 0, 0, BEYOND, 1, 1, DESCRIPTOR), "offsets below"),
        (ranks.encode_post(1, 1, 0, 0, 0, 1, 2, DESCRIPTOR), "2 of 1 bytes ready"),
        (ranks.encode_post(1, 1, 0, 0, 0, 1, 1, DESCRIPTOR, b"x"), "flags 0 and 1 bytes"),
        (ranks.encode_post(1, 1, D, 0, 0, 1, 1, DESCRIPTOR, b"x"), "flags 2 and 1 bytes"),
        (ranks.encode_post(1, 1, F | D, 0, 0, 0, 0, DESCRIPTOR), "flags 3"),
        (ranks.encode_post(1, 1, 8, 0, 0, 0, 0, DESCRIPTOR), "flags 8"),
        (ranks.encode_post(1, 1, F, 0, 0, N, N, DESCRIPTOR), "inline Post says 32 of 32 bytes and has 0"),
        (ranks.encode_post(1, 1, F, 0, 0, N, N - 1, DESCRIPTOR, PAYLOAD), "inline Post says 31 of 32"),
        (ranks.encode_post(1, 1, F, 0, 0, 40000, 40000, DESCRIPTOR, bytes(40000)), "limit 32768"),
        (ranks.encode_post(1, 1, 0, 0, 0, 1, 1, bytes((48 << 10) + 1)), "descriptor of 49153 bytes"),
        (ranks.encode_post(1, 1, 0, 0, 0, 1, 1, DESCRIPTOR)[:-1], "descriptor of 29 bytes in a datagram"),
        (ranks.encode_result(1, 0, L, 0, 0, 1, 1), "Result of op 0"),
        (ranks.encode_result(1, 1, L, 0, 0, 1, 2), "flags 4, 1 of 2 bytes ready"),
        (ranks.encode_result(1, 1, 0, 0, 0, 3, 2), "3 of 2 bytes ready"),
        (ranks.encode_result(1, 1, 0, 0, 0, 1, HUGE), "sizes at most"),
        (ranks.encode_result(1, 1, F, 0, 0, N, N, PAYLOAD), "flags 1"),
        (ranks.encode_result(1, 1, D, 0, 0, 0, 0), "flags 2"),
        (ranks.encode_result(1, 1, F | D | L, 0, 0, 0, 0), "flags 7"),
        (ranks.encode_result(1, 1, F | L, 0, 0, N, N, PAYLOAD[1:]), "32 of 32 bytes and has 31"),
        (ranks.encode_result(1, 1, L, 0, 0, 1, 1, b"x"), "1 bytes behind it"),
        (ranks.encode_mail(1, 0, 0, 1, 0, 1, "int8"), "Mail 0 of 1 bytes"),
        (ranks.encode_mail(1, 1, 0, 1, 0, HUGE, "int8"), "sizes at most"),
        (ranks.encode_mail(1, limits.MAIL_NUMBER, 0, 1, 0, 1, "int8"), "numbers are 1 to"),
        (ranks.encode_mail(1, 1, 2, 1, 0, 1, "int8"), "Mail with flags 2"),
        (ranks.encode_mail(1, 1, 0, ranks.ANY, 0, 1, "int8"), "to rank 65535"),
        (ranks.encode_mail(1, 1, F, 1, 0, N, "int8", PAYLOAD[1:]), "inline Mail says 32 bytes and has 31"),
        (ranks.encode_mail(1, 1, 0, 1, 0, N, "int8", PAYLOAD), "flags 0 and 32 bytes behind it"),
        (ranks.encode_mail(1, 1, F, 1, 0, 40000, "int8", bytes(40000)), "limit 32768"),
        (ranks.encode_mail(1, 1, 0, 1, 0, 1, "int8").replace(b"int8", b"\xff\xfe--"), "dtype is called"),
        (ranks.encode_mail_bytes(1, 1, 4, 1, 0, 0, 1), "MailBytes with flags 4"),
        (ranks.encode_mail_bytes(1, 1, 0, 1, 0, BEYOND, 1), "MailBytes with flags 0 at"),
        (ranks.encode_receive(1, 0, 1, 0, 1, "int8"), "Receive 0"),
        (ranks.encode_arrived(1, 1, 0, 1, 0, 0, 3, 2), "Arrived with flags 0, 3 of 2"),
        (ranks.encode_arrived(1, 1, L, 1, 0, 0, 1, 2), "Arrived with flags 4, 1 of 2"),
        (ranks.encode_arrived(1, 1, F, 1, 0, 0, N, N, PAYLOAD), "Arrived with flags 1"),
        (ranks.encode_mail_taken(1, 0), "MailTaken 0"),
        (ranks.encode_mail_done(1, 0, 3), "MailDone 0"),
        (ranks.encode_mail_asked(1, 1, 3) + b"x", "kind 85 has 16 bytes, its struct 15"),
        (b"\x0a", "kind 10 is malformed (1 bytes)"),
        (b"\x0a\x02{}", "kind 10 is malformed"),
        (b"\x0a\x01{}", "kind 10 is a piece of a longer message"),
        (b"\x0a\x00", "Peek is malformed at the top"),
        (b"\x0a\x00[]", "Peek is malformed"),
        (b'\x0a\x00{"x":1}', "Peek is malformed at x"),
        (b"\x47\x00" + b'{"snapshot":' + b'{"a":' * 5000, "Peeked is malformed"),
        (b"\x0a\x00" + bytes(limits.JSON_PIECE_BYTES + 1), "kind 10 is malformed"),
    ],
)  # fmt: skip
def test_refusals(datagram: bytes, complaint: str) -> None:
    with pytest.raises(WireError) as caught:
        ranks.decode(datagram)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) <= 320
    if "piece" not in complaint:
        with pytest.raises(WireError):
            ranks.Assembler().feed(datagram)


@pytest.mark.parametrize("kind", [ranks.Hello.KIND, ranks.Welcome.KIND])
def test_another_version_is_named_before_its_fields(kind: int) -> None:
    with pytest.raises(VersionMismatch) as caught:
        ranks.decode(bytes((kind, 0)) + b'{"field of tomorrow":[1],"protocol":%d}' % (PROTOCOL + 1))
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL, PROTOCOL + 1)
    with pytest.raises(WireError, match="malformed at"):
        ranks.decode(bytes((kind, 0)) + b'{"protocol":%d}' % PROTOCOL)


def test_join_without_its_handle_is_the_join_of_the_core() -> None:
    join = next(message for message in RANKS if isinstance(message, ranks.Join))
    plain = join.group()
    assert type(plain) is JoinGroup
    assert plain == JoinGroup(**{name: getattr(join, name) for name in JoinGroup.model_fields})


# ------------------------------------------------------------- split messages
def big(chars: int) -> ranks.Peeked:
    return ranks.Peeked(snapshot={"text": "x" * chars})


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_json_is_split_at_the_piece_size(pieces: int, extra: int) -> None:
    overhead = len('{"snapshot":{"text":""}}')
    message = big(pieces * limits.JSON_PIECE_BYTES - overhead + extra)
    datagrams = ranks.encode_json(message)
    assert len(datagrams) == pieces + (extra > 0)
    assert [datagram[1] for datagram in datagrams] == [1] * (len(datagrams) - 1) + [0]
    assembler = ranks.Assembler(ranks.FROM_PEER)
    assert [assembler.feed(datagram) for datagram in datagrams[:-1]] == [None] * (len(datagrams) - 1)
    assert assembler.feed(datagrams[-1]) == message


def test_binary_datagrams_may_come_between_pieces() -> None:
    first, last = ranks.encode_json(big(60_000))
    assembler = ranks.Assembler(ranks.FROM_PEER)
    assert assembler.feed(first) is None
    assert assembler.feed(ranks.encode_freed(1, 2)) == ranks.Freed(1, 2)
    assert assembler.feed(last) == big(60_000)


def test_other_json_between_pieces_is_refused_and_drops_them() -> None:
    first, last = ranks.encode_json(big(60_000))
    [joined] = ranks.encode_json(ranks.Joined(handle=1))
    assembler = ranks.Assembler()
    assembler.feed(first)
    with pytest.raises(WireError, match="in the middle of one of kind 71"):
        assembler.feed(joined)
    assert assembler.feed(joined) == ranks.Joined(handle=1)
    with pytest.raises(WireError, match="Peeked is malformed"):
        assembler.feed(last)


@pytest.mark.parametrize(
    ("accept", "wrong"), [("FROM_RANK", ranks.FROM_PEER), ("FROM_PEER", ranks.FROM_RANK)]
)
def test_kinds_of_the_other_direction_are_refused(accept: str, wrong: frozenset[int]) -> None:
    for message in RANKS:
        [datagram] = encode_datagrams(message)
        assembler = ranks.Assembler(getattr(ranks, accept))
        if datagram[0] in wrong:
            with pytest.raises(WireError, match=f"unexpected kind {datagram[0]}"):
                assembler.feed(datagram)
        else:
            assert assembler.feed(datagram) == message


def test_the_sum_of_pieces_is_bounded() -> None:
    piece = b"\x47\x01" + bytes(limits.JSON_PIECE_BYTES)
    assembler, fed = ranks.Assembler(), 0
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="longer than 16777216 bytes"):  # noqa: PT012
            while fed < 10 * limits.JSON_BYTES:
                assert assembler.feed(piece) is None
                fed += limits.JSON_PIECE_BYTES
        assert fed <= limits.JSON_BYTES
        assert tracemalloc.get_traced_memory()[1] < 3 * limits.JSON_BYTES
        assert tracemalloc.get_traced_memory()[0] < 1 << 20, "what was held is let go"
    finally:
        tracemalloc.stop()


def test_endless_empty_pieces_hold_nothing() -> None:
    assembler = ranks.Assembler()
    tracemalloc.start()
    try:
        for _ in range(20_000):
            assert assembler.feed(b"\x47\x01") is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@given(st.integers(0, 65535), st.integers(0, (1 << 64) - 1), st.integers(0, 7))
def test_claimed_lengths_allocate_nothing(length: int, nbytes: int, flags: int) -> None:
    datagram = struct.pack("<BIQBHQQQH", 4, 1, 1, flags, 0, 0, nbytes, nbytes, length)
    try:
        post = ranks.decode(datagram)
    except WireError:
        return
    assert isinstance(post, ranks.Post)
    assert (length, len(post.payload)) == (0, 0)
    assert nbytes <= (0 if flags == F else limits.TENSOR_BYTES)


def test_json_that_is_too_long_or_not_unicode_is_not_sent() -> None:
    with pytest.raises(WireError, match=r"Peeked of \d+ bytes, limit 16777216"):
        ranks.encode_json(big(limits.JSON_BYTES))
    with pytest.raises(WireError, match="cannot be written as JSON"):
        ranks.encode_json(ranks.Peeked.model_construct(snapshot={"bad": "\ud800"}))


def test_the_table_of_limits_is_consistent() -> None:
    assert descriptor.MAX_DESCRIPTOR_BYTES == limits.DESCRIPTOR_BYTES
    assert descriptor.MAX_DIMS == limits.DIMS
    assert descriptor.MAX_NBYTES == limits.TENSOR_BYTES
    assert limits.JSON_PIECE_BYTES + 2 <= limits.DATAGRAM_BYTES
    assert max(limits.CHUNK_BYTES, limits.CONTROL_BYTES) <= limits.FRAME_BYTES
    assert limits.clip("x" * limits.TEXT_CHARS) == "x" * limits.TEXT_CHARS
    assert limits.clip("abcdefgh", 6) == "abc..."
