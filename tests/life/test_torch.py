"""What only torch's own ranks can show: claims of a rank, errors that pass a ``finally``, forked workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.light import repeated
from support.ranks import Ranks

pytestmark = pytest.mark.torch
Machines = Callable[[int], list[Path]]


def claim(rank: int, size: int, url: str) -> dict[str, object]:
    # All have imported torch before any begins: who is missing after 5 s must not depend on that.
    folder = os.path.dirname(url.removeprefix("file://"))  # noqa: F821
    open(f"{folder}/here.{os.getpid()}", "w").close()  # noqa: F821
    while sum(name.startswith("here.") for name in os.listdir(folder)) < size:  # noqa: F821
        time.sleep(0.02)
    from frogzmq.backend import create

    moments = {"begin": time.time()}
    meet = create.meet

    def claiming(*args: object) -> object:
        moments["claim"] = time.time()
        return meet(*args)

    create.meet = claiming
    try:
        dist.init_process_group(
            "frogzmq",
            init_method=url,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=7),  # noqa: F821
        )
    except dist.DistBackendError as error:
        return {
            "rank": rank, "pid": os.getpid(), "error": type(error).__name__,  # noqa: F821
            "text": str(error), **moments, "ended": time.time(),
        }  # fmt: skip
    return {}


@repeated(20)
def test_c012_two_processes_claim_the_same_rank(tmp_path: Path, machines: Machines, run: int) -> None:
    url = f"file://{tmp_path}/claims"
    with Ranks(tmp_path) as ranks:
        ranks.start(claim, 4, machines(2), url, url="none", numbers=[0, 1, 0, 1])
        done = ranks.finish(90)
    said = [rank.value for rank in done]
    assert all(said), [rank.stderr for rank in done]
    refused = [value for value in said if value["error"] == "DuplicateIdentity"]
    waited = {
        value["rank"]: (value, rank) for value, rank in zip(said, done, strict=True) if value not in refused
    }
    assert sorted(value["rank"] for value in refused) == sorted(waited) == [0, 1]
    for value in refused:
        first = waited[value["rank"]][0]
        # From when it can claim at all: what a busy machine takes to start its peer comes before.
        assert value["ended"] - value["claim"] < 5
        assert f"belongs to process {first['pid']} on host" in value["text"]
    for value, rank in waited.values():
        assert value["error"] == "DeadlineExceeded"
        assert "missing ranks 2, 3" in value["text"]
        assert "waiting for ranks 2, 3" in rank.stderr
        assert 6 < value["ended"] - value["begin"] < 20


def raise_before_finally(rank: int, size: int) -> None:
    t = torch.ones(3)
    dist.all_reduce(t)
    try:
        if rank == size - 1:
            raise ValueError("label 7 of batch 5 is out of range")
        dist.all_reduce(t)
    finally:
        dist.destroy_process_group()


@repeated(20)
def test_c019_an_error_on_its_way_through_a_finally(
    tmp_path: Path, machines: Machines, run: int, pytestconfig: pytest.Config
) -> None:
    size = 4 if pytestconfig.getoption("--repeats") else 2
    with Ranks(tmp_path) as ranks:
        ranks.start(raise_before_finally, size, machines(2), timeout_s=1800)
        done = ranks.finish(60)
    for rank in done:
        assert rank.code == 1, rank.stderr
        assert "ValueError: label 7 of batch 5 is out of range" in rank.stderr
    for rank in done[:-1]:
        assert f"RankLost: rank {size - 1}" in rank.stderr


def load_with_workers(rank: int, size: int, epochs: int) -> tuple[int, float]:
    from torch.utils.data import DataLoader

    dist.all_reduce(torch.ones(1))
    child = os.fork()  # noqa: F821
    if child == 0:
        code = 4
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 3
        sys.exit(code)  # noqa: F821  # exit handlers run in the child too
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: F821
    loader = DataLoader(
        torch.arange(16.0),
        batch_size=2,
        num_workers=4,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    batches = 0
    for _ in range(epochs):
        for batch in loader:
            t = batch + rank
            dist.all_reduce(t)
            assert torch.equal(t, batch * size + sum(range(size)))
            batches += 1
    t = torch.ones(100_000)
    dist.all_reduce(t)
    assert (t == size).all()
    begin = time.monotonic()
    dist.destroy_process_group()  # the workers live
    return batches, time.monotonic() - begin


@repeated(30)
def test_c048_forked_workers_of_a_data_loader(tmp_path: Path, machines: Machines, run: int) -> None:
    with Ranks(tmp_path) as ranks:
        env = {"TORCHELASTIC_RUN_ID": "none"}  # as under torchrun, the launcher is watched
        ranks.start(load_with_workers, 2, machines(2), 3, env=env)
        done = ranks.finish(90)
    for rank in done:
        assert rank.code == 0, rank.stderr
        batches, seconds = rank.value
        assert batches == 24
        assert seconds < 4, "leaving waited for a thread that could not end"
