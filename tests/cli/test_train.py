"""``autopar train`` on real processes: a searched plan trains as one process does; what does not fit is said once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.ir.plan import Plan

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(depth)))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()

def model():
    return Net()

def other():
    return Net(depth=3)

def example_inputs(batch_size=8):
    return (torch.zeros(batch_size, 16), torch.zeros(batch_size, 16))

def batches(batch_size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(torch.randn(batch_size, 16, generator=generator) for _ in range(2))
"""


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    assert code is None or isinstance(code, int)
    return code or 0


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def test_train_matches_one_process(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.yaml")
    assert autopar(monkeypatch, "search", net, "--gpus", "2", "--gpu", "cpu", "--pp", "2", "-o", plan) == 0
    assert Plan.load(plan).num_stages == 2
    capfd.readouterr()
    assert autopar(monkeypatch, "train", net, plan, "--steps", "3", "--compare-single") == 0
    printed = capfd.readouterr()
    steps = [line.split() for line in printed.out.splitlines() if line[:4].strip().isdigit()]
    assert [int(step[0]) for step in steps] == [1, 2, 3]
    assert all(float(step[3]) <= 1e-5 for step in steps)
    assert "largest relative difference" in printed.out


def test_a_plan_for_another_model_is_refused_once(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.yaml")
    assert autopar(monkeypatch, "search", net, "--gpus", "2", "--gpu", "cpu", "--dp", "2", "-o", plan) == 0
    capfd.readouterr()
    assert autopar(monkeypatch, "train", f"{net}:other", plan, "--steps", "3") == 2
    printed = capfd.readouterr()
    assert printed.err.count("PlanMismatch") == 1
    assert "Traceback" not in printed.err


def test_training_goes_on_under_another_plan(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plans = {name: str(tmp_path / f"{name}.yaml") for name in ("pp", "dp")}
    for name, plan in plans.items():
        assert autopar(monkeypatch, "search", net, "--gpus", "2", "--gpu", "cpu", f"--{name}", "2", "-o", plan) == 0
    run = str(tmp_path / "run")
    assert autopar(monkeypatch, "train", net, plans["pp"], "--steps", "3", "--save", run, "--save-every", "2") == 0
    capfd.readouterr()
    assert autopar(monkeypatch, "train", net, plans["dp"], "--steps", "5", "--resume", run, "--compare-single") == 0
    steps = [line.split() for line in capfd.readouterr().out.splitlines() if line[:4].strip().isdigit()]
    before, *made = steps
    assert before[0] == "3" and before[2] == "before"
    assert [int(step[0]) for step in made] == [4, 5]
    assert all(float(step[3]) <= 1e-5 for step in made)
