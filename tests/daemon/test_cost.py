"""What a peer and the package cost when they do nothing. Figures are printed; memory is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from support.fleet import ROOT, Fleet

IMPORT = """
import json, sys, time
import torch, torch.distributed
before = set(sys.modules)
started = time.process_time()
import frogzmq
spent = time.process_time() - started
print(json.dumps({"cpu_s": spent, "loaded": sorted(set(sys.modules) - before)}))
"""


def test_a_peer_is_ready_soon_small_and_quiet(fleet: Fleet) -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        peer = fleet.start()
        took.append(time.monotonic() - started)
    before, started = peer.peek()["process"], time.monotonic()
    time.sleep(5.0)
    after, passed = peer.peek()["process"], time.monotonic() - started
    cpu = (after["cpu_s"] - before["cpu_s"]) / passed
    print(
        f"ready in {min(took):.2f} s (of {[f'{t:.2f}' for t in took]}), {after['rss_bytes'] / 1e6:.0f} MB "
        f"resident, {100 * cpu:.3f} % of a core, {after['threads']} threads"
    )
    assert after["rss_bytes"] < 80e6
    assert cpu < 0.05, "an idle peer must not poll"


@pytest.mark.torch
def test_importing_it_adds_nothing_heavy_to_torch() -> None:
    env = os.environ | {"PYTHONPATH": os.fspath(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    print(f"import frogzmq: {1000 * told['cpu_s']:.1f} ms beyond torch, loading {told['loaded']}")
    assert "frogzmq.backend.register" in told["loaded"]
    assert not {"zmq", "pydantic", "blake3", "frogzmq.client"} & set(told["loaded"])
