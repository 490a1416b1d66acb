"""Accelerate and Lightning, started with the backend's name only; skipped where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.ecosystem, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]

ACCELERATE = """
import sys, torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=sys.argv[1])])
torch.manual_seed(0)
model, data = nn.Linear(10, 1), torch.randn(64, 10)
pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(pairs, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
loss = accelerator.gather(nn.functional.mse_loss(model(data), data.sum(1, keepdim=True)).reshape(1)).mean()
if accelerator.is_main_process:
    group = torch.distributed.group.WORLD
    print("loss", f"{loss.item():.5f}", type(group).__name__, accelerator.num_processes)
accelerator.end_training()
"""
LIGHTNING = """
import sys, torch, lightning, logging, warnings
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
warnings.simplefilter("ignore"); logging.getLogger("lightning").setLevel(logging.ERROR)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__(); self.net = nn.Linear(10, 1)
    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        self.log("loss", loss, sync_dist=True); return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
torch.manual_seed(0)
data = torch.randn(64, 10)
names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
quiet = dict.fromkeys(names, False)
strategy = DDPStrategy(process_group_backend=sys.argv[1])
trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=2, strategy=strategy, **quiet)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
if trainer.is_global_zero:
    loss = trainer.callback_metrics["loss"].item()
    print("loss", f"{loss:.5f}", type(torch.distributed.group.WORLD).__name__, trainer.world_size)
"""


def run(tmp_path: Path, script: str, backend: str, **variables: str) -> list[str]:
    """The words of the line that begins with ``loss``."""
    path = tmp_path / "script.py"
    path.write_text(script)
    env = {k: v for k, v in os.environ.items() if not k.startswith("FROGZMQ_")}
    env |= {"FROGZMQ_RUNTIME_DIR": str(tmp_path / "peer"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(path), backend], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("loss ")).split()


def compare(tmp_path: Path, script: str, name: str, **variables: str) -> None:
    (tmp_path / "peer").mkdir(mode=0o700)
    ours, theirs = run(tmp_path, script, name, **variables), run(tmp_path, script, "gloo")
    assert ours[2:] == ["FrogProcessGroup", "2"]
    assert theirs[2:] == ["ProcessGroup", "2"]
    assert ours[1] == theirs[1]


def test_lightning_changes_the_name_only(tmp_path: Path):
    pytest.importorskip("lightning")
    compare(tmp_path, LIGHTNING, "frogzmq")


def test_accelerate_knows_only_names_of_its_own(tmp_path: Path):
    """On a CPU it takes "gloo" and nothing else, so we stand behind that."""
    pytest.importorskip("accelerate")
    compare(tmp_path, ACCELERATE, "gloo", FROGZMQ_AS_GLOO="1")
