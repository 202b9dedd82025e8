"""The command line, run as a user would: what it prints, and exit code 2 with one message for mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.ir.plan import Plan
from tests.report.sample import sample_plan

ROOT = Path(__file__).parents[2]
MLP = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()

def model():
    return Net()

def branching():
    class Branching(Net):
        def forward(self, x):
            if x.sum() > 0:
                return self.layers(x).mean()
            return x.mean()
    return Branching()

def example_inputs(batch_size=16, seq_len=8):
    return (torch.zeros(batch_size, seq_len, 64),)
"""

ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(63, 125)

    def forward(self, x):
        return self.up(x).square().mean()

def model():
    return Odd()

def example_inputs(batch_size=16, seq_len=8):
    return (torch.zeros(batch_size, 63),)
"""

JSON_KEYS = {
    "step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_memory_bytes", "host_activation_bytes",
    "fit_probability", "feasible", "pp", "cluster", "mesh", "schedule", "virtual_stages", "microbatch_size",
    "num_microbatches", "zero", "remat", "capture_time_s", "search_time_s", "optimality_gap", "breakdown_s", "divided",
    "lengths", "goodput",
}  # fmt: skip


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MLP)
    return str(path)


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_search_writes_plan_and_report(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    arguments = ("search", net, "--gpus", "4", "--gpu", "cpu", "-o", str(plan), "--report", str(page), "--json")
    assert autopar(monkeypatch, *arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == JSON_KEYS
    assert printed["feasible"] is True
    assert sum(printed["goodput"]["shares"].values()) == pytest.approx(1)
    loaded = Plan.load(plan)
    assert loaded.num_ranks == 4
    assert printed["mesh"] == dict(loaded.mesh)
    assert "If things were otherwise" in page.read_text()
    assert loaded.prediction is not None and loaded.prediction.goodput is not None
    assert loaded.prediction.goodput.model_dump() == printed["goodput"]
    assert autopar(monkeypatch, "show", str(plan)) == 0
    shown = capsys.readouterr().out.lower()
    assert "net on 4 × cpu" in shown
    assert f"goodput {100 * printed['goodput']['goodput']:.1f} %: " in shown


def test_estimate_pins_every_degree(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autopar(monkeypatch, "estimate", net, "--gpus", "4", "--gpu", "cpu", "--tp", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["pp"], printed["mesh"]) == (1, {"dp": 2, "tp": 2})


def test_an_axis_that_divides_little_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    assert autopar(monkeypatch, "estimate", str(path), "--gpus", "2", "--gpu", "cpu", "--tp", "2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    words = "tp 2 divides 0 of 756,000 FLOP; whole on every rank: up/linear (k 63, n 125 not divisible by 2)"
    assert words in shown
    plan, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    arguments = ("--gpus", "2", "--gpu", "cpu", "--tp", "2", "--json", "-o", str(plan), "--report", str(page))
    assert autopar(monkeypatch, "estimate", str(path), *arguments) == 0
    divided = json.loads(capsys.readouterr().out)["divided"]["tp"]
    assert (divided["share"], divided["total_flops"], divided["words"]) == (0.0, 756_000, words)
    assert words in page.read_text()
    assert autopar(monkeypatch, "explain", str(plan)) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_estimate_of_a_schedule(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    arguments = ("--gpus", "4", "--gpu", "cpu", "--pp", "2", "--schedule", "zb-v", "--num-microbatches", "4")
    assert autopar(monkeypatch, "estimate", net, *arguments, "--json", "-o", str(plan)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["pp"], printed["schedule"], printed["virtual_stages"]) == (2, "zb-v", 2)
    assert (Plan.load(plan).num_stages, Plan.load(plan).num_ranks) == (4, 4)
    assert autopar(monkeypatch, "show", str(plan)) == 0
    shown = capsys.readouterr().out
    assert "pp 2" in shown and "schedule zb-v, 2 stages a rank" in " ".join(shown.split())
    assert autopar(monkeypatch, "estimate", net, *arguments, "--virtual-stages", "3") == 2
    assert "zb-v has 2 virtual stages a rank, not 3" in capsys.readouterr().err


def test_show_reads_a_plan_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_plan().save(tmp_path / "plan.yaml")
    assert autopar(monkeypatch, "show", str(tmp_path / "plan.yaml")) == 0
    assert "9.84 s a step" in capsys.readouterr().out
    assert autopar(monkeypatch, "report", str(tmp_path / "plan.yaml")) == 0
    assert "does not say where its model is" in capsys.readouterr().err
    assert (tmp_path / "plan.html").stat().st_size > 1_000_000
    assert autopar(monkeypatch, "report", str(tmp_path / "plan.yaml"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "plan.html"), "with_model": False}
    assert autopar(monkeypatch, "report", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "no" / "plan.html")) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_compare_says_what_separates_two_plans(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / name) for name in ("dp.yaml", "tp.yaml")]
    for name, degree in zip(names, ("--dp", "--tp"), strict=True):
        assert autopar(monkeypatch, "estimate", net, "--gpus", "4", "--gpu", "cpu", degree, "4", "-o", name) == 0
    capsys.readouterr()
    assert autopar(monkeypatch, "compare", *names) == 0
    shown = capsys.readouterr().out
    assert "dp 4" in shown and "tp 4" in shown and "÷ 4" in shown
    assert autopar(monkeypatch, "compare", *names, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["mesh"] == ["dp 4", "tp 4"]
    assert found["ops"] and found["same_model"]
    assert autopar(monkeypatch, "show", names[0], "--json") == 0
    assert Plan.model_validate_json(capsys.readouterr().out) == Plan.load(names[0])


@pytest.mark.parametrize("command", ["search", "estimate", "show", "explain", "compare", "check", "train"])
def test_help_shows_examples(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar(monkeypatch, command, "--help") == 0
    assert f"autopar {command} " in capsys.readouterr().out.partition("Examples:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "{net}"), "how many GPUs?"),
        (("search", "{net}", "--gpus", "4", "--gpu", "h10"), "did you mean 'h100-sxm'?"),
        (("search", "{net}", "--gpus", "4", "--cluster", "nowhere.yaml"), "cannot read cluster nowhere.yaml"),
        (("search", "{net}:tiny", "--gpus", "4"), "has no function tiny()"),
        (("search", "{net}", "--gpus", "6", "--tp", "4"), "does not divide the 6 ranks"),
        (("search", "{net}", "--gpus", "4", "--dp", "4", "--global-batch", "3"), "batch of 3 does not divide"),
        (("search", "{net}:branching", "--gpus", "4"), "if x.sum() > 0"),
        (("show", "nowhere.yaml"), "cannot read plan nowhere.yaml"),
        (("train", "{net}", "nowhere.yaml"), "cannot read plan nowhere.yaml"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: tuple[str, ...],
    message: str,
    net: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert autopar(monkeypatch, *(argument.format(net=net) for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_json_of_what_does_not_fit(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert autopar(monkeypatch, "search", net, "--gpus", "4", "--tp", "3", "--json") == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["feasible"] is False
    assert "does not divide" in printed["reason"]


def test_a_cluster_file_gives_what_flags_do_not(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text("gpu: a100-80gb\nnum_gpus: 4\nmemory_gb: 40\n")
    assert autopar(monkeypatch, "search", net, "--cluster", str(tmp_path / "cluster.yaml"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["feasible"] is True
    (tmp_path / "cluster.yaml").write_text("gpu: a100-80gb\nnum_gpu: 4\n")
    assert autopar(monkeypatch, "search", net, "--cluster", str(tmp_path / "cluster.yaml")) == 2
    assert "num_gpu" in capsys.readouterr().err
