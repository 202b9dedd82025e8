"""A plan on other software than it was predicted with: what an export and a comparison say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.ir.plan import Plan
from tests.cli.test_explain import GPT, Terminal

MEGATRON = "megatron-core-2025"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def plans(tmp_path: Path, terminal: Terminal) -> dict[str, Path]:
    found = {}
    for stack in ("autopar", MEGATRON):
        found[stack] = tmp_path / f"{stack}.yaml"
        pins = "--tp", 4, "--num-microbatches", 1, "--precision", "bf16", "--stack", stack
        terminal("estimate", GPT, "--gpus", 4, "--gpu", "h100-sxm", *pins, "--json", "-o", found[stack])
    return found


def step_of(plan: Path) -> float:
    prediction = Plan.load(plan).prediction
    assert prediction is not None
    return prediction.step_time_s


def test_plans_of_two_stacks_are_compared_on_both(plans: dict[str, Path], terminal: Terminal) -> None:
    ours, theirs = (step_of(plans[stack]) for stack in ("autopar", MEGATRON))
    found = terminal.json("compare", plans["autopar"], plans[MEGATRON])
    assert found["stacks"] == ["autopar", MEGATRON] and found["same_cluster"]
    on = {stack: found["on_stacks"][stack]["step_time_s"] for stack in ("autopar", MEGATRON)}
    assert (on["autopar"][0], on[MEGATRON][1]) == pytest.approx((ours, theirs), rel=1e-6), "each as it was predicted"
    assert on[MEGATRON][0] < ours and on["autopar"][1] > theirs
    shown = terminal("compare", plans["autopar"], plans[MEGATRON])
    assert f"step on {MEGATRON}" in shown and f"the second on {MEGATRON}" in shown
    assert terminal.json("compare", plans["autopar"], plans["autopar"])["on_stacks"] == {}
    asked = terminal.json("compare", plans["autopar"], plans["autopar"], "--stack", MEGATRON)
    assert list(asked["on_stacks"]) == ["autopar", MEGATRON]
    said = terminal("compare", plans["autopar"], plans["autopar"], "--stack", "megatron-core-2052", code=2)
    assert f"did you mean '{MEGATRON}'?" in said


def test_an_export_says_what_its_target_takes(plans: dict[str, Path], terminal: Terminal, tmp_path: Path) -> None:
    found = terminal.json("export", plans["autopar"], "--to", "megatron")
    (note,) = (note for note in found["notes"] if "predicted" in note)
    assert f"On {MEGATRON}, which runs this" in note and "the plan's own prediction, on autopar, is" in note
    assert "which runs this, a step of this plan is predicted" in " ".join(found["text"].replace("#", "").split())
    without = terminal.json("export", plans["autopar"], "--to", "megatron", "--no-predict")
    assert not any("predicted" in note for note in without["notes"])
    plan = Plan.load(plans["autopar"])
    lost = tmp_path / "lost.yaml"
    plan.model_copy(update={"model": plan.model.model_copy(update={"source": None})}).save(lost)
    notes = terminal.json("export", lost, "--to", "torchtitan")["notes"]
    assert any("not predicted on torchtitan-2024" in note and "--model" in note for note in notes)
