"""Receipts: equal exactly when everything is, and telling who is wrong when not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.content.chunks import digest_chunk
from frogzmq.content.receipt import Receipt, accuse, compare
from frogzmq.errors import WireError
from frogzmq.types import Digest


def named(text: str) -> Digest:
    return digest_chunk(text.encode())


GOOD = Receipt(7, named("op"), (named("a"), named("b"), named("c")), named("sum"))
ORIGINS = ("ada", "bob", "cyd")
GOLDEN = "223196fd42add2e60756fe55de965c395315fc0cf4706f7883ddf3ddb11e1fbe"

digest = st.sampled_from([named(x) for x in "xyz"])
receipts = st.builds(Receipt, st.integers(1, 3), digest, st.lists(digest, max_size=3).map(tuple), digest)


def test_golden_receipt():
    """Receipts are compared between machines: a change is a new protocol version."""
    assert GOOD.digest.hex() == GOLDEN


@given(receipts, receipts)
def test_digests_agree_exactly_when_receipts_do(first, second):
    assert (first.digest == second.digest) == (first == second)
    assert (compare(first, second) == ()) == (first == second)


@pytest.mark.parametrize(
    ("other", "what", "part"),
    [
        (replace(GOOD, seq=8), "op", -1),
        (replace(GOOD, descriptor=named("other")), "descriptor", -1),
        (replace(GOOD, parts=GOOD.parts[:2]), "parts", -1),
        (replace(GOOD, parts=(named("a"), named("B"), named("c"))), "part", 1),
        (replace(GOOD, result=named("SUM")), "result", -1),
    ],
)
def test_compare_says_what_differs(other, what, part):
    (found,) = compare(GOOD, other)
    assert (found.what, found.part) == (what, part)
    assert found.mine != found.theirs
    assert found.mine in found.describe()
    assert found.theirs in found.describe()


def test_nobody_is_accused_when_all_agree():
    assert accuse(dict.fromkeys(ORIGINS, GOOD), ORIGINS) == {}
    assert accuse({}, ORIGINS) == {}


def test_the_minority_folded_wrongly():
    found = accuse({"ada": GOOD, "bob": replace(GOOD, result=named("bad")), "cyd": GOOD}, ORIGINS)
    assert list(found) == ["bob"]
    assert "another result" in found["bob"]


def test_who_holds_other_bytes_than_the_giver_is_wrong():
    wrong = replace(GOOD, parts=(named("A"), *GOOD.parts[1:]), result=named("bad"))
    found = accuse({"ada": GOOD, "bob": wrong, "cyd": GOOD}, ORIGINS)
    assert list(found) == ["bob"]
    assert "part 0" in found["bob"]
    assert "ada" in found["bob"]


def test_the_giver_decides_even_against_the_majority():
    wrong = replace(GOOD, parts=(named("A"), *GOOD.parts[1:]), result=named("bad"))
    assert set(accuse({"ada": GOOD, "bob": wrong, "cyd": wrong}, ORIGINS)) == {"bob", "cyd"}


def test_two_machines_cannot_tell():
    found = accuse({"ada": GOOD, "bob": replace(GOOD, result=named("bad"))}, ("ada", "bob", "bob"))
    assert set(found) == {"ada", "bob"}
    assert "fold the parts again" in found["ada"]


def test_another_operation_or_number_of_parts_is_named():
    late = replace(GOOD, seq=9)
    short = replace(GOOD, parts=GOOD.parts[:1])
    found = accuse({"ada": GOOD, "bob": late, "cyd": GOOD, "dan": short}, ORIGINS)
    assert set(found) == {"bob", "dan"}
    assert "operation" in found["bob"]
    assert "1 parts where there are 3" in found["dan"]


def test_a_field_that_is_no_digest_is_refused():
    with pytest.raises(WireError, match="op 7"):
        replace(GOOD, result=Digest(b"short")).digest  # noqa: B018
