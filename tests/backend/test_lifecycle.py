"""How groups begin and end: duplicates, missing ranks, errors, kills, forks, names and imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import ROOT, Ranks, run_ranks

import frogzmq

pytestmark = pytest.mark.torch
Machines = Callable[[int], list[Path]]


def raise_in_rank_1(rank: int, size: int) -> None:
    import atexit

    dist.all_reduce(torch.ones(1))
    if rank == 1:
        atexit.register(dist.destroy_process_group)
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))


def kill_rank_1(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


def init_by_hand(rank: int, size: int, url: str) -> list[str]:
    texts = []
    for backend, options in (
        ("frogzmq", {"mod": "shard"}),
        ("frogzmq", {"mode": "sharp"}),
        ("cpu:frogzmq,cuda:gloo", None),
    ):
        try:
            dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, pg_options=options)
        except dist.DistBackendError as error:
            texts.append(f"{type(error).__name__} {error}")
    for _ in range(2):
        options = frogzmq.Options(mode="faithful", order="rank")
        dist.init_process_group(
            "cpu:frogzmq,cuda:frogzmq", init_method=url, rank=rank, world_size=size, pg_options=options
        )
        t = torch.ones(1)
        dist.all_reduce(t)
        texts.append(str(t.item()))
        dist.barrier()
        dist.destroy_process_group()
    return texts


def test_uncaught_error_reaches_the_others(tmp_path: Path, machines: Machines) -> None:
    with Ranks(tmp_path) as ranks:
        ranks.start(raise_in_rank_1, 2, machines(1))
        done = ranks.finish(60)
    assert [r.code for r in done] == [1, 1], done[0].stderr
    assert "RankLost" in done[0].stderr
    assert "rank 1" in done[0].stderr
    assert "ValueError: bad batch" in done[0].stderr


def test_killed_rank_is_named(tmp_path: Path, machines: Machines) -> None:
    with Ranks(tmp_path) as ranks:
        ranks.start(kill_rank_1, 2, machines(1))
        done = ranks.finish(60)
    assert [r.code for r in done] == [1, -9], done[0].stderr
    assert "RankLost" in done[0].stderr
    assert "rank 1" in done[0].stderr


def test_options_device_maps_and_a_second_group_in_one_process(tmp_path: Path, machines: Machines) -> None:
    url = f"file://{tmp_path}/byhand"
    texts, _ = run_ranks(tmp_path, init_by_hand, 2, machines(1), url, url="none")
    assert texts[0].startswith("ConfigError frogzmq.Options: unknown option 'mod' (did you mean 'mode'?)")
    assert "'sharp' is not known" in texts[1]
    assert "cannot share a group with other backends" in texts[2]
    assert texts[3:] == ["2.0", "2.0"]


def run_python(code: str, **env: str) -> str:
    child_env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_nothing_heavy() -> None:
    heavy = "[m for m in ('torch', 'zmq', 'numpy', 'pydantic', 'blake3') if m in sys.modules]"
    assert run_python(f"import sys, frogzmq; print({heavy})") == "[]\n"
    code = """
import sys, torch
from torch import distributed as dist
dist.Backend._plugins.pop("FROGZMQ", None)
for name in [m for m in sys.modules if m.split(".")[0] == "frogzmq"]:
    del sys.modules[name]
before = set(sys.modules)
import frogzmq
new = sorted({m.split(".")[0] for m in set(sys.modules) - before} - {"frogzmq"})
print(new, "FROGZMQ" in dist.Backend._plugins, frogzmq.Options)
frogzmq.register(); frogzmq._autoload()
"""
    assert run_python(code).startswith("[] True <class")


def test_autoload_never_raises() -> None:
    code = """
import sys
sys.modules["torch"] = None
import frogzmq
frogzmq._autoload()
print("fine")
"""
    assert run_python(code) == "fine\n"


def test_torch_finds_the_backend_by_itself_at_little_cost() -> None:
    """The entry point of ``torch.backends``, and its two switches; what it adds to ``import torch``."""
    torch_off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code = "import torch; print('frogzmq' in torch.distributed.Backend.backend_list)"
    for switches, want in ({}, "True"), ({"FROGZMQ_AUTOLOAD": "0"}, "False"), (torch_off, "False"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            capture_output=True, text=True, check=True, env={**os.environ, **switches},
        )  # fmt: skip
        assert done.stdout.strip() == want, switches
        lines = [line.split("|") for line in done.stderr.splitlines() if "| " in line]
        own = [int(own.split(":")[-1]) for own, _, name in lines if name.strip().startswith("frogzmq")]
        assert sum(own) < 10_000  # microseconds; 2,000 were seen
