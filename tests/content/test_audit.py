"""Testimonies of machines about one op: nobody is odd where all agree, and the right one where not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frogzmq.content.audit import Case, describe, digest_parts, judge
from frogzmq.content.audit import Testimony as Said
from frogzmq.content.chunks import CHUNK_BYTES, digest_chunk
from frogzmq.content.manifest import Manifest, Tally, tensor_root
from frogzmq.types import Digest


def named(text: str) -> Digest:
    return digest_chunk(text.encode())


OP, SUM = named("op"), named("sum")
PARTS = [named(text) for text in "abc"]
CASE = Case(((0, 1), (2,), (3,)), frozenset(range(4)), 3)
GOOD = {
    host: Said(OP, ((host, PARTS[host]),), digest_parts(PARTS), SUM) for host in range(3)
}  # fmt: skip
NAMES = ["machine ada (ranks 0, 1)", "machine bob (rank 2)", "machine cyd (rank 3)"]


def test_all_agree() -> None:
    assert judge(CASE, GOOD) is None
    assert judge(CASE, {host: replace(each, held=None) for host, each in GOOD.items()}) is None


def test_a_result_of_its_own_names_the_machine_and_its_ranks() -> None:
    found = judge(CASE, {**GOOD, 1: replace(GOOD[1], result=named("bad"))})
    assert found is not None
    assert (found.what, found.hosts, found.ranks, found.certain) == ("result", (1,), (2,), True)
    assert describe(found, NAMES) == "machine bob (rank 2) has another result than it should"


def test_a_rank_that_got_something_else_is_named_alone() -> None:
    found = judge(CASE, {**GOOD, 0: replace(GOOD[0], odd=((1, named("bad")),))})
    assert found is not None
    assert (found.what, found.hosts, found.ranks) == ("rank", (), (1,))
    assert "rank 1 got other bytes" in describe(found, NAMES)


def test_two_results_without_a_majority_name_both() -> None:
    case = Case(((0,), (1,)), frozenset((0, 1)), 2)
    heard = {0: Said(OP, result=SUM), 1: Said(OP, result=named("bad"))}
    found = judge(case, heard)
    assert found is not None
    assert (found.ranks, found.certain) == ((0, 1), False)
    assert "no majority" in describe(found, NAMES)
    source = judge(replace(case, source=1), heard)
    assert source is not None
    assert (source.hosts, source.certain) == ((0,), True)


def test_a_machine_whose_ranks_all_got_something_else_is_odd_itself() -> None:
    """Its memory changed after the ranks had read it."""
    case = Case(((0, 1, 2),), frozenset(range(3)), 3)
    odd = tuple((rank, SUM) for rank in range(3))
    found = judge(case, {0: Said(OP, result=named("bad"), odd=odd)})
    assert found is not None
    assert (found.what, found.hosts) == ("result", (0,))


def test_who_folded_other_contributions_than_were_given() -> None:
    wrong = replace(GOOD[2], held=digest_parts([named("A"), *PARTS[1:]]), result=named("bad"))
    found = judge(CASE, {**GOOD, 2: wrong})
    assert found is not None
    assert (found.what, found.hosts) == ("parts", (2,))


@given(st.integers(0, 2), st.sampled_from(["descriptor", "result"]))
def test_one_of_three_is_always_found(host: int, field: str) -> None:
    found = judge(CASE, {**GOOD, host: replace(GOOD[host], **{field: named("other")})})
    assert found is not None
    assert found.what == field
    assert found.hosts == (host,)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_tally_is_the_root_of_the_whole_however_it_is_cut(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    cuts = sorted({0, size, size // 3, min(size, CHUNK_BYTES), size - size // 7})
    tally = Tally()
    for start, stop in pairwise(cuts):
        tally.feed(data[start:stop])
    assert tally.root() == tensor_root(data)
    if size:
        assert tally.root() == Manifest.of(data).root
