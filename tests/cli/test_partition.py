"""The command ``partition``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopar.cli.main import main

MLP = """
import torch
from torch import nn

def model():
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))]
    return nn.Sequential(*layers, Mean())

class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()

def example_inputs(batch_size=8, seq_len=0):
    return (torch.randn(batch_size, 8),)
"""


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int | None)
    return left.value.code or 0


def test_partition_prints_the_program_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net, plan = tmp_path / "net.py", tmp_path / "plan.yaml"
    net.write_text(MLP)
    pins = ("--gpus", "4", "--gpu", "cpu", "--pp", "2", "--tp", "2", "--num-microbatches", "2")
    assert autopar(monkeypatch, "search", str(net), *pins, "-o", str(plan)) == 0
    capsys.readouterr()
    assert autopar(monkeypatch, "partition", str(net), str(plan), "--rank", "3") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("stage 1 of 2 on (tp=2)") and "stage 0" not in printed
    assert "tp:" in printed and "redistribution" not in printed
    assert autopar(monkeypatch, "partition", str(net), str(plan), "--print-after", "insert-redistributions") == 0
    assert "read_parameter" in capsys.readouterr().out
    assert autopar(monkeypatch, "partition", str(net), str(plan), "--print-after", "split-means") == 0
    assert capsys.readouterr().out.startswith("linear_default: f32[8, 32] = linear(")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank", "4"), "--rank 4: the plan has 4 ranks, 0 to 3"),
        (("--print-after", "lower"), "there is no such pass"),
    ],
)
def test_partition_says_what_there_is(
    flags: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    net, plan = tmp_path / "net.py", tmp_path / "plan.yaml"
    net.write_text(MLP)
    assert autopar(monkeypatch, "search", str(net), "--gpus", "4", "--gpu", "cpu", "-o", str(plan)) == 0
    capsys.readouterr()
    assert autopar(monkeypatch, "partition", str(net), str(plan), *flags) == 2
    assert message in capsys.readouterr().err
