"""A job whose last checkpoint could not be written ends with its state in memory, which the same command saves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file
from autopar.runtime.checkpoint.folder import newest_step

# Without room while there is a file of that name.
MODEL = """
import shutil
from pathlib import Path

import torch
from torch import nn

usage = shutil.disk_usage

def usage_now(path):
    found = usage(path)
    return found._replace(free=0) if Path("full").exists() else found

shutil.disk_usage = usage_now

def model():
    return nn.Sequential(nn.Linear(8, 8), Loss())

class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()

def example_inputs(batch_size=4):
    return (torch.zeros(batch_size, 8),)
"""


def test_the_same_command_saves_what_had_no_room(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    source = load_model_file(str(tmp_path / "net.py"))
    plan = autopar.search(source.meta_model(), make_cluster("cpu", 2), example_inputs=source.meta_inputs(), dp=2)
    plan.save(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "autopar", "train", "net.py", "plan.yaml", "--save-every", "10"]
    command += ["--steps", "5", "--keep-alive", "--job", "job"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    (tmp_path / "full").touch()
    first = run()
    assert first.returncode == 2
    assert "the same command saves it once there is room" in first.stderr + first.stdout
    assert newest_step(tmp_path / "job") is None
    (tmp_path / "full").unlink()
    second = run()
    assert second.returncode == 0, second.stderr
    assert newest_step(tmp_path / "job") == 5
