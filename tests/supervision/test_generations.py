"""Ranks that are started again do not meet what is left in the store of those before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file

# The first rank ends after a step twice, then asks for the end of the job; when that is started again it ends before
# its first step, when there is no copy of the generation yet.
MODEL = """
import os
import signal
from pathlib import Path

import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), Loss())

class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()

def example_inputs(batch_size=4):
    return (torch.zeros(batch_size, 8),)

def batches(batch_size, seed):
    starts = Path("starts")
    number = 1 + (len(starts.read_text()) if starts.exists() else 0)
    first = os.environ.get("RANK") == "0"
    if first:
        starts.write_text("x" * number)
    made = 0
    while True:
        if first and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if first and made == 2 and number < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if first and made == 2 and number == 3:
            os.kill(os.getppid(), signal.SIGTERM)
        yield (torch.full((batch_size, 8), float(made)),)
        made += 1
"""


def test_a_generation_without_a_copy_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    source = load_model_file(str(tmp_path / "net.py"))
    plan = autopar.search(source.meta_model(), make_cluster("cpu", 2), example_inputs=source.meta_inputs(), dp=2)
    plan.save(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "autopar", "train", "net.py", "plan.yaml"]
    command += ["--steps", "40", "--keep-alive", "--job", "job"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert run().returncode == 143
    again = run()
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "starts").read_text() == 5 * "x"
