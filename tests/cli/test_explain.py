"""``explain``: what a plan communicates, and an op's runner-up at the price that a search without its choice finds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.ir.plan import Plan

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
DATA = "that is data parallelism, which the axis is not for"
OTHER = """
import torch

def model():
    return torch.nn.Linear(8, 8)

def example_inputs(batch_size=16, seq_len=8):
    return (torch.zeros(batch_size, 8),)
"""


class Terminal:
    """The command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Runs it, expects this exit code, and returns what was printed, or the error."""
        self.monkeypatch.setattr(sys, "argv", ["autopar", *map(str, arguments)])
        self.monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as left:
            main()
        printed = self.capsys.readouterr()
        assert (left.value.code or 0) == code, printed.err
        return printed.out if code == 0 else printed.err

    def json(self, *arguments: object) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def plan(tmp_path: Path, terminal: Terminal) -> Path:
    path = tmp_path / "plan.yaml"
    terminal("estimate", GPT, "--gpus", 4, "--gpu", "cpu", "--tp", 4, "--num-microbatches", 1, "--json", "-o", path)
    return path


def op_of(plan: Path) -> tuple[str, str]:
    """A tensor-parallel linear of the repeated block, and what divides it."""
    block = max(Plan.load(plan).blocks, key=lambda own: own.repeats)
    return next((f"{block.name}/{op}", axes["tp"]) for op, axes in block.ops.items() if op.endswith("/linear"))


def test_the_runner_up_is_what_a_search_without_the_choice_finds(
    plan: Path, tmp_path: Path, terminal: Terminal
) -> None:
    op, factor = op_of(plan)
    found = terminal.json("explain", plan, op)
    assert found["placement"] == [["tp", factor]]
    assert any(own["axis"] == "tp" and own["forward_s"] + own["backward_s"] > 0 for own in found["communications"])
    assert {"axis": "tp", "factor": "d0", "reason": DATA} in found["excluded"]
    assert all(one["factor"] != factor for one in found["excluded"])
    first, second = found["alternatives"]
    forbidden = ["--forbid", f"{op}: tp={factor}"]
    for alternative in (first, second):
        again = terminal.json("search", GPT, "--like", plan, *forbidden, "-o", tmp_path / "again.yaml")
        assert again["step_time_s"] == pytest.approx(alternative["step_time_s"], rel=1e-9)
        assert again["step_time_s"] >= found["step_time_s"] * (1 - 1e-9)
        other = alternative["placement"][0][1]
        assert Plan.load(tmp_path / "again.yaml").mesh == {"tp": 4}
        forbidden += ["--forbid", f"{op}: tp={other or '*'}"]
    assert first["step_time_s"] <= second["step_time_s"]
    assert len({factor, first["placement"][0][1], second["placement"][0][1]}) == 3
    shown = terminal("explain", plan, op)
    assert f"d0 over tp: {DATA}" in shown
    assert "over tp 4" in shown and "--forbid" in shown and "all_gather" in shown


def test_without_an_op_every_communication_is_listed(plan: Path, terminal: Terminal) -> None:
    found = terminal.json("explain", plan)
    listed = found["communications"]
    assert [one["step_s"] for one in listed] == sorted((one["step_s"] for one in listed), reverse=True)
    assert {one["axis"] for one in listed} == {"tp"}
    repeats = max(block.repeats for block in Plan.load(plan).blocks)
    assert any(one["forward"] == "all_gather" and one["times"] == repeats for one in listed)
    # Together they are what the prediction says of the axis.
    assert sum(one["step_s"] for one in listed) == pytest.approx(found["breakdown_s"]["communication_tp"], rel=0.01)
    assert "all_gather" in terminal("explain", plan)


def test_the_critical_path(plan: Path, terminal: Terminal) -> None:
    found = terminal.json("explain", plan, "--critical-path")
    assert sum(one["step_s"] for one in found["items"]) == pytest.approx(found["step_time_s"], rel=1e-9)
    # No stream runs beside compute on a CPU, and there is no pipeline: the path is the whole prediction.
    assert found["step_time_s"] == pytest.approx(found["predicted_step_time_s"], rel=0.02)
    assert found["pipeline_wait_s"] == 0 and [own["rank"] for own in found["ranks"]] == [0]
    collectives = [one for one in found["items"] if one["kind"] == "collective"]
    assert {one["axis"] for one in collectives} == {"tp"}
    listed = terminal.json("explain", plan)["communications"]
    assert sum(one["step_s"] for one in collectives) == pytest.approx(sum(one["step_s"] for one in listed), rel=0.1)
    shown = terminal("explain", plan, "--critical-path")
    assert "It waits for:" in shown and found["items"][0]["of"] in shown and "waiting at the pipeline" not in shown
    assert "whole step" in terminal("explain", plan, "mlp.up/linear", "--critical-path", code=2)


def test_what_cannot_be_explained(plan: Path, tmp_path: Path, terminal: Terminal) -> None:
    op, _ = op_of(plan)
    assert "places no op 'mlp.upp/linear'" in terminal("explain", plan, "mlp.upp/linear", code=2)
    assert "no mesh axis 'cp'" in terminal("search", GPT, "--like", plan, "--forbid", f"{op}: cp=n", code=2)
    assert "is no factor" in terminal("search", GPT, "--like", plan, "--forbid", f"{op}: tp=zz", code=2)
    assert "the plan places no op 'nothing'" in terminal(
        "search", GPT, "--like", plan, "--forbid", "nothing: tp=n", code=2
    )
    assert "expected OP: AXIS=FACTOR" in terminal("search", GPT, "--like", plan, "--forbid", "mlp", code=2)
    assert "--like" in terminal("search", GPT, "--like", plan, "--tp", 2, code=2)
    anonymous = tmp_path / "anonymous.yaml"
    loaded = Plan.load(plan)
    loaded.model_copy(update={"model": loaded.model.model_copy(update={"source": None})}).save(anonymous)
    assert "--model" in terminal("explain", anonymous, op, code=2)
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    assert "is for gpt" in terminal("explain", plan, op, "--model", other, code=2)
