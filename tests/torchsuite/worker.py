"""One rank of torch's own ``DistributedTest``: runs the tests that it is told to, one after the other.

Reads a test's name per line, answers with a line of JSON: ``{"test", "outcome", "text"}``, outcome being
``pass``, ``skip`` or ``fail``. Every test gets a process group of its own, as in torch's runner, but not a process
of its own: importing torch takes longer than most tests.
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
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    backend = os.environ["BACKEND"]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.argv[3]:
        import frogzmq

        frogzmq.install(as_gloo=backend == "gloo")
    from torch.testing._internal import common_distributed as common

    cases = common.DistTestCases
    for feature in ("ddp", "subgroup", "plugin"):
        cases.backend_feature[feature].add(backend)
    if int(os.environ["WORLD_SIZE"]) > 2:
        common.skip_if_small_worldsize = lambda function: function  # else: skipped below 8 ranks
    from torch.testing._internal.distributed import distributed_test as suite

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def _barrier(self, *args: object, **kwargs: object) -> None:
            suite.Barrier.sync(*args, **kwargs)

    print(json.dumps({"tests": sorted(n for n in dir(Case) if n.startswith("test_"))}), file=answers)
    for number, line in enumerate(sys.stdin, 1):
        name = line.strip()
        suite.Barrier.barrier_id = 1000 * number  # whatever became of the test before
        outcome, text = "pass", ""
        try:
            run(suite, dist, Case(name), name, rank, folder, backend)
        except unittest.SkipTest as error:
            outcome, text = "skip", str(error)
        except SystemExit as error:
            skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
            if error.code:
                outcome, text = ("skip", skips[error.code]) if error.code in skips else ("fail", str(error.code))
        except BaseException:
            outcome, text = "fail", traceback.format_exc()
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                outcome, text = "fail", text + traceback.format_exc()
        print(json.dumps({"test": name, "outcome": outcome, "text": text}), file=answers)
    return 0


def run(suite: Any, dist: Any, case: Any, name: str, rank: int, folder: Path, backend: str) -> None:
    """As ``TestDistBackend._run`` does it, in this process."""
    from torch.testing._internal.common_utils import set_rng_seed

    if getattr(getattr(type(case), name), "__unittest_skip__", False):
        raise unittest.SkipTest(getattr(type(case), name).__unittest_skip_why__)
    case.rank, case.file_name = rank, os.fspath(folder / name)  # with a rank, the method runs here
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    dist.init_process_group(
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
