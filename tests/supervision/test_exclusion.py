"""A slow rank is excluded, and training goes on without its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file

MODEL = """
import os, time
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), Loss())

class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()

def example_inputs(batch_size=6):
    return (torch.zeros(batch_size, 8),)

def batches(batch_size, seed):
    place = os.environ.get("LOCAL_RANK")
    with open("places", "a") as file:
        file.write(f"{os.environ.get('WORLD_SIZE')}:{place} ")
    while True:
        time.sleep(0.2 if place == "1" else 0.0)
        yield (torch.ones(batch_size, 8),)
"""


@pytest.mark.slow
def test_a_slow_rank_is_excluded_and_its_place_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    source = load_model_file(str(tmp_path / "net.py"))
    plan = autopar.search(source.meta_model(), make_cluster("cpu", 3), example_inputs=source.meta_inputs(), dp=3)
    plan.save(tmp_path / "plan.yaml")
    command = ("train", "net.py", "plan.yaml", "--steps", "100", "--keep-alive", "--exclude-stragglers")
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *command], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 on " in done.stderr and "it is excluded" in done.stderr, done.stderr
    assert "a plan for 2 ranks" in done.stderr, done.stderr
    numbers = [line.split()[0] for line in done.stdout.splitlines() if line.split()[0].isdigit()]
    assert list(dict.fromkeys(numbers))[-1] == "100"
    assert set((tmp_path / "places").read_text().split()) == {"3:0", "3:1", "3:2", "2:0", "2:2"}
