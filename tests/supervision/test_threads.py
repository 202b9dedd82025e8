"""Ranks that are forked compute with threads of their own, whatever the model file has computed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file

MODEL = """
import torch
from torch import nn

LARGE = torch.ones(1 << 22).add_(1)

def model():
    LARGE.add_(1)
    return nn.Sequential(nn.Linear(512, 512), Loss())

class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()

def example_inputs(batch_size=512):
    return (torch.zeros(batch_size, 512),)

def batches(batch_size, seed):
    with open("threads", "a") as file:
        file.write(f"{torch.get_num_threads()} ")
    while True:
        yield (LARGE[: batch_size * 512].view(batch_size, 512) / 2,)
"""


def test_a_pool_of_threads_before_a_fork_is_not_waited_for_after_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    source = load_model_file(str(tmp_path / "net.py"))
    plan = autopar.search(source.meta_model(), make_cluster("cpu", 2), example_inputs=source.meta_inputs(), dp=2)
    plan.save(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "autopar", "train", "net.py", "plan.yaml", "--steps", "3", "--keep-alive"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "threads").read_text().split() == ["2", "2"]
