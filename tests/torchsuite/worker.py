"""One rank of torch's own ``DistributedTest``: runs the tests that it is told to, one after the other.

Reads a test's name per line, answers with a line of JSON: ``{"test", "outcome", "text"}``, outcome being
``pass``, ``skip`` or ``fail``. Every test gets a process group of its own, as in torch's runner, but not a
process of its own: importing torch takes longer than most tests.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any


def main() -> int:
    """Serve until the end of input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # tests print
    rank, folder, ours = int(sys.argv[1]), Path(sys.argv[2]), bool(sys.argv[3])
    backend = os.environ["BACKEND"]
    common, suite, case = load(backend, ours)
    names = sorted(name for name in dir(case) if name.startswith("test_"))
    print(json.dumps({"tests": names}), file=answers)
    for number, line in enumerate(sys.stdin, 1):
        name = line.strip()
        suite.Barrier.barrier_id = 1000 * number  # whatever became of the test before
        outcome, text = attempt(lambda name=name: run(suite, case(name), name, rank, folder, backend), common)
        try:
            if suite.dist.is_initialized():
                suite.dist.destroy_process_group()
        except Exception:
            outcome, text = "fail", text + traceback.format_exc()
        print(json.dumps({"test": name, "outcome": outcome, "text": text}), file=answers)
    return 0


def load(backend: str, ours: bool) -> tuple[Any, Any, type]:
    """torch's helpers, its suite, and the class of tests, with our name let in."""
    import torch

    torch.set_num_threads(1)
    if ours:
        import frogzmq

        frogzmq.install(as_gloo=backend == "gloo")
    from torch.testing._internal import common_distributed as common

    for feature in ("ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add(backend)
    if int(os.environ["WORLD_SIZE"]) > 2:
        common.skip_if_small_worldsize = lambda function: function  # else: skipped below 8 ranks
    from torch.testing._internal.distributed import distributed_test as suite

    if ours and backend == "gloo":
        # Checks of the events that Gloo's own code gives to the profiler; ours have another name.
        for events in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            events.remove("gloo")

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, *args: object, **kwargs: object) -> None:
            suite.Barrier.sync(*args, **kwargs)

    return common, suite, Case


def attempt(task: Any, common: Any) -> tuple[str, str]:
    """Outcome and text of a test; torch's suite skips by leaving the process."""
    try:
        task()
    except unittest.SkipTest as error:
        return "skip", str(error)
    except SystemExit as error:
        skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
        if error.code in skips:
            return "skip", skips[error.code]
        return ("fail", f"exit {error.code}") if error.code else ("pass", "")
    except BaseException:
        return "fail", traceback.format_exc()
    return "pass", ""


def run(suite: Any, case: Any, name: str, rank: int, folder: Path, backend: str) -> None:
    """As ``TestDistBackend._run`` does it, in this process."""
    from torch.testing._internal.common_utils import set_rng_seed

    if getattr(getattr(type(case), name), "__unittest_skip__", False):
        raise unittest.SkipTest(getattr(type(case), name).__unittest_skip_why__)
    case.rank, case.file_name = rank, os.fspath(folder / name)  # with a rank, the method runs here
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    suite.dist.init_process_group(
        init_method=f"file://{case.file_name}",
        backend=backend,
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=rank,
        timeout=timedelta(seconds=seconds),
    )
    case._barrier()
    set_rng_seed()
    getattr(case, name)()
    case._barrier()


if __name__ == "__main__":
    sys.exit(main())
