"""Receipts and fingerprints of real ranks on one and two machines."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

import frogzmq

pytestmark = pytest.mark.torch

PLACES = pytest.mark.parametrize("placement", [(0, 0, 0), (0, 0, 1)], ids=["one", "two"])
RECEIPTS: dict[str, object] = {"receipts": True}
VERIFY: dict[str, object] = {"verify": True}


def flip_one_bit(seq_to_flip: int) -> Any:
    """Have this process copy one bit of one op's result wrongly; returns how to undo it."""
    from frogzmq.client.ops import Op

    put = Op.put

    def faulty(self: Op, data: Any) -> None:
        put(self, data)
        if self.seq == seq_to_flip and self.taken:
            self.sinks[0][0] ^= 1

    Op.put = faulty  # type: ignore[method-assign]
    return lambda: setattr(Op, "put", put)


def many(rank: int, size: int) -> None:
    """Collectives of every kind, small and large."""
    for count in (3, 40_000, 700_000):
        dist.all_reduce(torch.full((count,), float(rank)))
        dist.broadcast(torch.full((count,), rank), 0)
        dist.all_gather([torch.empty(count) for _ in range(size)], torch.full((count,), float(rank)))
        dist.reduce(torch.ones(count), 1)
    dist.barrier()


def kept(rank: int, size: int) -> list[dict[str, Any]]:
    many(rank, size)
    rows = frogzmq.receipts()
    assert frogzmq.compare_receipts() is None
    return rows


@PLACES
def test_equal_receipts_on_all_ranks(pool: Pool, placement: tuple[int, ...]) -> None:
    logs = pool.run(kept, placement, options=RECEIPTS)
    for rows in zip(*logs, strict=True):
        first = rows[0]
        assert first["seq"] == rows[1]["seq"] == rows[2]["seq"]
        assert len({row["descriptor"] for row in rows}) == 1
        if first["kind"] in ("all_reduce", "all_gather"):
            assert {row["mine"] for row in rows} == {first["result"]}
            assert len({row["receipt"] for row in rows}) == 1
            assert all(part["root"] for part in first["parts"])
        elif first["kind"] == "broadcast":
            assert rows[0]["mine"] is None
            assert rows[1]["mine"] == rows[2]["mine"] == first["result"]
    assert [row["seq"] for row in logs[0]] == list(range(1, 14))


def flipped(rank: int, size: int, count: int) -> tuple[int, tuple[int, ...], str]:
    undo = flip_one_bit(2) if rank == 1 else lambda: None
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(count))
    finally:
        undo()
    found = frogzmq.compare_receipts(check=False)
    assert found is not None
    with pytest.raises(frogzmq.IntegrityError, match="op 2 .*rank 1"):
        frogzmq.compare_receipts()
    return found.seq, found.ranks, found.text


@PLACES
@pytest.mark.parametrize("count", [5, 100_000])
def test_a_flipped_bit_names_the_rank_and_the_op(pool: Pool, placement: tuple[int, ...], count: int) -> None:
    for seq, ranks, text in pool.run(flipped, placement, count, options=RECEIPTS):
        assert (seq, ranks) == (2, (1,))
        assert "all_reduce(SUM)" in text


def verified(rank: int, size: int, count: int) -> str:
    many(rank, size)
    undo = flip_one_bit(14) if rank == 2 else lambda: None
    try:
        with pytest.raises(frogzmq.IntegrityError) as caught:
            dist.all_reduce(torch.ones(count))
        assert isinstance(caught.value, dist.DistBackendError)
    finally:
        undo()
    return str(caught.value)


@PLACES
@pytest.mark.parametrize("count", [5, 100_000])
def test_verify_raises_on_every_rank(pool: Pool, placement: tuple[int, ...], count: int) -> None:
    texts = pool.run(verified, placement, count, options=VERIFY)
    assert len(set(texts)) == 1
    assert "op 14 all_reduce(SUM)" in texts[0]
    assert "rank 2 got other bytes" in texts[0]


def async_and_strided(rank: int, size: int) -> bool:
    works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(100)]
    strided = torch.full((100, 200), 1.0)[:, ::2]
    dist.all_reduce(strided)
    for work in works:
        work.wait()
    return bool((strided == size).all())


@PLACES
def test_verified_ops_may_overlap_and_fill_strided_tensors(pool: Pool, placement: tuple[int, ...]) -> None:
    assert all(pool.run(async_and_strided, placement, options=VERIFY))


def drifted(rank: int, size: int) -> tuple[str | None, str | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    same = frogzmq.compare_fingerprints(model)
    if rank == 1:
        with torch.no_grad():
            model[1].bias[2] = 1e-30
            model[2].weight[0, 0] += 1
    with pytest.raises(frogzmq.IntegrityError, match=r"rank 1 .*'1\.bias'"):
        frogzmq.compare_fingerprints(model)
    return same, frogzmq.compare_fingerprints(model, check=False)


def test_a_drifted_parameter_is_named(pool: Pool) -> None:
    for same, found in pool.run(drifted, (0, 0, 1)):
        assert same is None
        assert found is not None
        assert "rank 1 " in found
        assert "'1.bias'" in found


def halves(rank: int, size: int) -> list[str]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for count in (1, 7, 4097):
            generator = torch.Generator().manual_seed(rank)
            tensor = torch.randn(count, generator=generator).to(dtype)
            tensor[0] = float("inf")
            dist.all_reduce(tensor)
            assert torch.isinf(tensor[0])
            found += frogzmq.fingerprint(tensor).values()
    assert frogzmq.compare_receipts() is None
    return found


def test_c068_halves_have_one_hash_on_all_ranks(pool: Pool) -> None:
    first, *others = pool.run(halves, (0, 0, 1), options=RECEIPTS)
    assert all(other == first for other in others)
    assert len(set(first)) == 6


def off(rank: int, size: int) -> str:
    dist.all_reduce(torch.ones(3))
    with pytest.raises(frogzmq.ConfigError) as caught:
        frogzmq.receipts()
    return str(caught.value)


def test_a_group_without_receipts_says_how_to_get_them(pool: Pool) -> None:
    for text in pool.run(off, (0, 0)):
        assert "FROGZMQ_RECEIPTS=1" in text


def groups(rank: int, size: int) -> bool:
    """C071: ten overlapping groups at the same time, each with its own log."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2], [2, 1])]
    mine = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for number in range(5):
        works = [dist.all_reduce(torch.full((9_000,), float(number)), group=g, async_op=True) for g in mine]
        for work in works:
            work.wait()
    for group in mine:
        assert [row["seq"] for row in frogzmq.receipts(group)] == [1, 2, 3, 4, 5]
        assert frogzmq.compare_receipts(group) is None
    return True


def test_c071_overlapping_groups_keep_receipts_apart(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(by_variable, (0, 0, 1), options=RECEIPTS) == [True] * 3


def by_variable(rank: int, size: int) -> bool:
    import os

    os.environ["FROGZMQ_RECEIPTS"] = "1"
    try:
        return groups(rank, size)
    finally:
        del os.environ["FROGZMQ_RECEIPTS"]


def test_peers_can_be_compared_from_outside(pool: Pool, tmp_path: Any) -> None:
    from typer.testing import CliRunner

    from frogzmq.cli.main import app

    pool.run(flipped, (0, 0, 1), 1000, options=RECEIPTS)
    dirs = [str(pool.machine(index)) for index in (0, 1)]
    time.sleep(0.2)
    done = CliRunner().invoke(app, ["peek", "--receipts", *dirs])
    assert done.exit_code == 1, done.output
    assert "rank 1 got other bytes" in done.output
