"""Numbers of training that cannot be right: what is taken for one, and steps that are left out on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import AutoparError
from autopar.load_model import load_model_file
from autopar.training.anomaly import ENOUGH, Anomaly, anomaly_of
from autopar.training.job import TrainingJob
from autopar.training.loop import train
from tests.harness import run_ranks

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x, y):
        return (self.last(self.norm(self.first(x)).tanh()) * y - y).square().mean()

def model():
    return Net()

def example_inputs(batch_size=4, seq_len=None):
    return torch.zeros(batch_size, 8), torch.ones(batch_size, 8)

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for number in range(100):
        x, y = torch.randn(batch_size, 8, generator=generator), torch.ones(batch_size, 8)
        if number == 3:
            x[-1, 0] = float("nan")
        if number == 23:
            y *= 100
        yield x, y
"""
BAD = (4, 24)
STEPS = 26


@pytest.mark.parametrize(
    ("loss", "before", "finite", "found"),
    [
        (2.0, [1.0] * ENOUGH, True, None),
        (3.1, [1.0] * ENOUGH, True, Anomaly("loss", 3.1, 1.0)),
        (3.1, [1.0] * (ENOUGH - 1), True, None),
        (1.0, [-1.0] * ENOUGH, True, None),
        (float("inf"), [], True, Anomaly("loss", float("inf"))),
        (float("inf"), [1.0] * ENOUGH, False, None),
    ],
)
def test_trouble_is_what_is_not_finite_or_far_above_the_median(
    loss: float, before: list[float], finite: bool, found: Anomaly | None
) -> None:
    assert anomaly_of({"loss": loss}, {"loss": before}, 3.0, finite=finite) == found


def test_a_gradient_norm_is_looked_at_after_the_loss_and_in_words() -> None:
    numbers = {"loss": 1.0, "gradient norm": 40.0}
    found = anomaly_of(numbers, {"loss": [1.0] * 30, "gradient norm": [2.0] * 30}, 10.0)
    assert str(found) == "the gradient norm is 40, 20 times the median of the steps before"
    assert anomaly_of(numbers, {"gradient norm": [2.0] * 30}, None) is None


def _train_each(jobs: dict[str, TrainingJob]) -> dict[str, Any]:
    """The summary of each job or the error that it raises; ``reference``: losses without the bad batches' updates."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        lines: list[str] = []
        try:
            train(job, lines.append)
            found[name] = json.loads(lines[0]) if lines else None
        except AutoparError as error:
            found[name] = f"{type(error).__name__}: {error}"
    job = jobs["skip"]
    opened = job.opened()
    torch.manual_seed(job.seed)
    example = opened.source.meta_inputs(4, None)
    pm = autopar.parallelize(opened.source.build(), 2, example_inputs=example, plan=opened.plan)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=job.learning_rate)
    losses = []
    assert opened.source.batches is not None
    for number, batch in zip(range(1, STEPS + 1), opened.source.batches(4, None, job.seed), strict=False):
        if number in BAD:
            continue
        losses.append(float(pm.step(*pm.shard_batch(batch))))
        optimizer.step()
        optimizer.zero_grad()
    found["reference"] = losses
    assert job.save is not None
    found["saved"] = autopar.load(pm, optimizer, job.save).data
    found["buffers"] = dict(pm.named_buffers())
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the runs, and what ``_train_each`` gives on each of two ranks."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "net.py").write_text(MODEL)
    source = load_model_file(str(folder / "net.py"))
    plan = autopar.search(source.meta_model(), make_cluster("cpu", 2), example_inputs=source.meta_inputs(), dp=2)
    plan.save(folder / "dp.yaml")

    def job(steps: int = STEPS, **more: Any) -> TrainingJob:
        options = {"on_nan": "skip", "max_jump": 20.0, "json": True, "seed": 5} | more
        return TrainingJob(model=str(folder / "net.py"), plan=str(folder / "dp.yaml"), steps=steps, **options)

    jobs = {
        "skip": job(save=str(folder / "skip")),
        "cut": job(22, save=str(folder / "cut")),
        "goes on": job(resume=str(folder / "cut")),
        "rollback": job(on_nan="rollback", save=str(folder / "rollback"), save_every=11),
        "stop": job(on_nan="stop", max_jump=None, save=str(folder / "stop")),
        "nowhere": job(on_nan="rollback"),
        "unknown": job(on_nan="ignore"),
        "diverges": job(optimizer="sgd", learning_rate=1e30, max_jump=None),
        "always bad": job(on_nan="rollback", optimizer="sgd", learning_rate=1e30, save=str(folder / "always")),
    }
    return folder, run_ranks(_train_each, 2, jobs)


def _losses(summary: dict[str, Any]) -> list[float]:
    return [loss for number, loss in enumerate(summary["losses"], summary["first_step"]) if number not in BAD]


def test_a_skipped_step_leaves_the_run_that_never_saw_its_update(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = runs[1]
    assert first["skip"]["losses"][3] is None and len(first["skip"]["losses"]) == STEPS
    assert _losses(first["skip"]) == first["reference"] == second["reference"]
    assert [entry["step"] for entry in first["skip"]["left_out"]] == list(BAD)
    assert all(value.isfinite().all() for value in first["buffers"].values())


def test_a_run_that_goes_back_is_the_run_that_skips(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    (found, _) = runs[1]
    assert found["rollback"]["losses"] == found["skip"]["losses"]
    assert found["rollback"]["first_step"] == 1 and len(found["rollback"]["step_times_s"]) == STEPS


def test_checkpoints_say_what_was_left_out_and_a_resumed_run_sees_the_same_jumps(
    runs: tuple[Path, list[dict[str, Any]]],
) -> None:
    (found, _) = runs[1]
    assert found["saved"]["left_out"] == list(BAD)
    assert found["cut"]["losses"] + found["goes on"]["losses"] == found["skip"]["losses"]


@pytest.mark.parametrize("name", ["skip", "rollback", "stop"])
def test_the_batch_is_recorded(runs: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    lines = [json.loads(line) for line in (runs[0] / name / "skipped.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(BAD[:1] if name == "stop" else BAD)
    assert (lines[0]["value"], lines[0]["what"], lines[0]["action"]) == ("nan", "loss", name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stop", "NotFinite: step 4: the loss is nan"),
        ("nowhere", "try: --job DIR, or --save DIR"),
        ("unknown", "expected stop, skip or rollback"),
        ("diverges", "number 10 in a row without an update"),
        ("always bad", "gone back to this step 3 times"),
    ],
)
def test_every_rank_stops(runs: tuple[Path, list[dict[str, Any]]], name: str, words: str) -> None:
    for rank in runs[1]:
        assert words in rank[name], rank[name]
