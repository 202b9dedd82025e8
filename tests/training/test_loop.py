"""The loop of ``autopar train`` on ranks that are there: where the data stands, what is reported, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import AutoparError
from autopar.load_model import load_model_file
from autopar.training.job import TrainingJob
from autopar.training.loop import train
from tests.harness import run_ranks

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(16, 100)

    def forward(self, tokens, targets):
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, y):
        return (self.layer(x) - y).square().mean()

class Kink(Regression):
    def forward(self, x, y):
        return super().forward(x, y) + (0 * self.layer(x)).abs().sqrt().mean()

def model():
    return Net()

def kink():
    return Kink()

def regression():
    return Regression()

def example_inputs(batch_size=8, seq_len=16):
    return tuple(torch.zeros(batch_size, seq_len, dtype=torch.long) for _ in range(2))
"""
FLOATS = MODEL.replace(", dtype=torch.long", "")


def _train_each(jobs: dict[str, TrainingJob]) -> dict[str, Any]:
    """What rank 0 says of each job, or the error that this rank raises."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        lines: list[str] = []
        try:
            train(job, lines.append)
            found[name] = lines
        except AutoparError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each of two ranks, what ``_train_each`` gives."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "net.py").write_text(MODEL)
    (folder / "floats.py").write_text(FLOATS)
    tokens = np.random.default_rng(0).integers(0, 100, 16 * 30)
    arrays = {"tokens": tokens, "other": tokens[:-16], "large": tokens + 100}
    for name, values in (arrays | {"held_out": tokens[::-1][: 16 * 20 + 1], "little": tokens[:100]}).items():
        np.save(folder / f"{name}.npy", values)
    for name, limits, model in (
        ("dp", {"dp": 2}, "net.py"), ("pp", {"pp": 2, "num_microbatches": 2}, "net.py"),
        ("floats", {"dp": 2}, "floats.py:regression"), ("four", {"dp": 4}, "net.py"),
        ("kink", {"dp": 2}, "floats.py:kink"),
    ):  # fmt: skip
        source = load_model_file(str(folder / model))
        cluster = make_cluster("cpu", 4 if name == "four" else 2)
        plan = autopar.search(source.meta_model(), cluster, example_inputs=source.meta_inputs(), **limits)
        plan.save(folder / f"{name}.yaml")

    def job(plan: str, steps: int = 5, data: str = "tokens", model: str = "net.py", **more: Any) -> TrainingJob:
        paths = {
            "model": str(folder / model),
            "plan": str(folder / f"{plan}.yaml"),
            "data": str(folder / f"{data}.npy"),
        }
        return TrainingJob(**paths, steps=steps, **{"json": True} | more)

    run, own = str(folder / "run"), str(folder / "own")
    jobs = {
        "whole": job("dp", seed=3, compare_single=True),
        "first": job("dp", 2, seed=3, save=run),
        "second": job("pp", resume=run),
        "lines": job("dp", 2, json=False),
        "other data": job("dp", resume=run, data="other"),
        "large token": job("dp", data="large"),
        "floats": job("floats", model="floats.py:regression"),
        "four ranks": job("four"),
        "no data": job("dp", data="nothing"),
        "evaluated": job("pp", 5, seed=3, eval_every=2, eval_data=str(folder / "held_out.npy"), eval_batches=9),
        "little held out": job("dp", eval_data=str(folder / "little.npy")),
        "evaluated on nothing": job("dp", eval_every=2),
        "diverges": job("dp", 4, optimizer="sgd", learning_rate=1e30, save=str(folder / "bad"), save_every=1),
        "not a gradient": replace(job("kink", 1, model="floats.py:kink", save=run), data=None),
        "unharmed": job("dp", 4, resume=run),
        "job starts": job("dp", 2, seed=3, job=own, save_every=1, keep=2),
        "job goes on": job("pp", seed=3, job=own),
        "job is done": job("pp", seed=3, job=own, json=False),
        "job that saves elsewhere": job("dp", job=own, save=run),
        "job that resumes elsewhere": job("dp", job=own, resume=run),
        "keeps nothing": job("dp", save=run, keep=0),
        "keeps what is not saved": job("dp", keep=2),
    }
    return run_ranks(_train_each, 2, jobs)


def test_a_run_goes_on_in_the_same_place_of_its_data(found: list[dict[str, Any]]) -> None:
    """The losses of a run cut in two, under two plans, are those of one run, over the end of an epoch."""
    whole, first, second = (json.loads(found[0][name][0]) for name in ("whole", "first", "second"))
    assert whole["agrees"] and whole["largest_difference"] < 1e-5
    assert (first["first_step"], second["first_step"]) == (1, 3)
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert (second["pp"], whole["mesh"], whole["num_ranks"]) == (2, {"dp": 2}, 2)


def test_rank_0_alone_reports(found: list[dict[str, Any]]) -> None:
    assert len(found[0]["whole"]) == 1 and found[1]["whole"] == []
    lines = found[0]["lines"]
    assert lines[0].startswith("Net on 2 cpu ranks") and "480 tokens in 1 file" in lines[1]
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"] and "tokens/s" in lines[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other data", "InvalidInput: the run that is resumed had other data"),
        ("large token", "expected: 0 to 99, the rows of the model's embedding"),
        ("floats", "from_tokens(tokens)"),
        ("four ranks", "PlanMismatch: the plan is for 4 ranks"),
        ("no data", "there is no such file or folder"),
    ],
)
def test_refusals_are_raised_on_every_rank(found: list[dict[str, Any]], name: str, words: str) -> None:
    for rank in found:
        assert words in rank[name], rank[name]


def test_held_out_losses_are_reported_and_training_goes_on_undisturbed(found: list[dict[str, Any]]) -> None:
    whole, evaluated = (json.loads(found[0][name][0]) for name in ("whole", "evaluated"))
    assert evaluated["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert evaluated["eval_steps"] == [2, 4, 5]
    first, *_, last = evaluated["eval_losses"]
    assert 3.5 < last < first < 6  # of tokens that are uniform over 100
    for rank in found:
        assert "at least the 8 of a global batch" in rank["little held out"]
        assert rank["evaluated on nothing"].endswith("try: --eval-data WHERE")


def test_a_loss_that_is_not_finite_is_said_and_no_checkpoint_is_overwritten(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["diverges"]
        assert said.startswith(("NotFinite: step 2: the loss is nan", "NotFinite: step 2: the loss is inf"))
        assert "microbatch 0 is not finite" in said
        # The loss is finite, its gradient is not.
        assert "step 1: " in rank["not a gradient"] and "nothing is saved" in rank["not a gradient"]
    assert json.loads(found[0]["unharmed"][0])["first_step"] == 3


def test_one_job_starts_and_goes_on_and_says_that_it_is_done(found: list[dict[str, Any]]) -> None:
    whole, starts, goes_on = (json.loads(found[0][name][0]) for name in ("whole", "job starts", "job goes on"))
    assert (starts["first_step"], goes_on["first_step"]) == (1, 3)
    assert starts["losses"] + goes_on["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found[0]["job is done"][-1] == "nothing to do: 5 steps are done"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("job that saves elsewhere", "try: --job without --save"),
        ("job that resumes elsewhere", "try: --job without --resume"),
        ("keeps nothing", "--keep 0: expected at least 1"),
        ("keeps what is not saved", "--keep needs a folder to save to"),
    ],
)
def test_contradictions_about_checkpoints_are_refused(found: list[dict[str, Any]], name: str, words: str) -> None:
    for rank in found:
        assert rank[name].startswith("InvalidInput") and words in rank[name], rank[name]
