"""Standing behind the name "gloo", and groups whose names collide."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool

pytestmark = pytest.mark.torch


def behind_gloo(rank: int, size: int) -> tuple[str, str, float]:
    import frogzmq
    from frogzmq.backend.process_group import FrogProcessGroup

    frogzmq.install(as_gloo=True)
    frogzmq.install(as_gloo=True)
    try:
        ours = dist.new_group(backend="gloo")
        again = dist.new_group([1, 0], backend="cpu:gloo")
    finally:
        frogzmq.install(as_gloo=False)
    frogzmq.install(as_gloo=False)
    theirs = dist.new_group(backend="gloo")
    assert isinstance(ours, FrogProcessGroup)
    assert isinstance(again, FrogProcessGroup)
    assert not isinstance(theirs, FrogProcessGroup)
    shown = [row["name"] for row in ours._group.client.peek()["groups"]]
    assert sum(name.endswith(" as gloo") for name in shown) == 2, shown
    tensor = torch.ones(3)
    for group in (ours, again, theirs):  # what exists goes on
        dist.all_reduce(tensor, group=group)
    return dist.get_backend(ours), dist.get_backend(theirs), float(tensor[0])


def test_the_name_is_taken_and_given_back(pool: Pool):
    assert pool.run(behind_gloo, [0, 1]) == [("gloo", "gloo", 8.0)] * 2


@pytest.mark.parametrize(("variable", "want"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_asks_for_it(variable: str, want: str):
    code = "import torch, frogzmq; from frogzmq.backend.standin import standing_in; print(standing_in())"
    env = {
        "PATH": "/usr/bin:/bin",
        "FROGZMQ_AS_GLOO": variable,
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == want


def own_groups_only(rank: int, size: int) -> float:
    """Each rank makes its own pair only, so that both pairs bear one name (C071)."""
    mine = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(mine)
    local = dist.new_group(mine, use_local_synchronization=True)
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=local)
    return float(tensor)


def singles(rank: int, size: int) -> float:
    """Groups of one rank, made behind "gloo" by the members of each pair only: all bear the same names."""
    import frogzmq

    frogzmq.install(as_gloo=True)
    try:
        pair, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend="gloo")
        alone, _ = dist.new_subgroups(1, group=pair, backend="gloo")
    finally:
        frogzmq.install(as_gloo=False)
    tensor = torch.tensor([1.0 + rank])
    for group in (alone, pair):
        dist.all_reduce(tensor, group=group)
    return float(tensor)


def test_groups_of_one_that_bear_one_name_do_not_cross(pool: Pool):
    assert pool.run(singles, [0, 1, 0, 0]) == [4.0, 6.0, 4.0, 6.0]


def test_c071_pairs_made_by_their_members_only_do_not_cross(pool: Pool):
    assert pool.run(own_groups_only, [0, 1, 0, 1]) == [6.0, 6.0, 14.0, 14.0]


def test_a_wrong_word_in_the_environment_is_said_while_torch_is_loaded():
    env = {
        "PATH": "/usr/bin:/bin",
        "FROGZMQ_AS_GLOO": "maybe",
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }
    code = "import torch, frogzmq; print('frogzmq' in torch.distributed.Backend.backend_list)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert "FROGZMQ_AS_GLOO: 'maybe' is not known; allowed: 1 or 0" in done.stderr
