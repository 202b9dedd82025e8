"""A job travels as JSON, and to processes in other folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.environment import Environment
from autopar.training.job import TrainingJob


def test_a_job_is_the_same_after_its_journey() -> None:
    job = TrainingJob(model="net.py", plan="p.yaml", steps=3, data="d", environment=Environment(timeout_s=5.0))
    assert TrainingJob.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("model", "absolute"), [("net.py", "{}/net.py"), ("net.py:large", "{}/net.py:large"), ("hf:llama", "hf:{}/llama")]
)
def test_paths_are_made_absolute(model: str, absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = TrainingJob(model=model, plan="p.yaml", steps=1, data="stdlib", save="run", job="job").with_absolute_paths()
    assert job.model == absolute.format(tmp_path)
    assert (job.plan, job.save, job.data, job.resume) == (f"{tmp_path}/p.yaml", f"{tmp_path}/run", "stdlib", None)
    assert job.job == f"{tmp_path}/job"


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, []),
        ({"save": "run"}, [25]),
        ({"save": "run", "save_every": 10}, [10, 20, 25]),
        ({"job": "run"}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25]),
        ({"job": "run", "save_every": 20}, [20, 25]),
    ],
)
def test_checkpoints_are_written_after(options: dict[str, Any], after: list[int]) -> None:
    job = TrainingJob(model="net.py", plan="p.yaml", steps=25, **options)
    assert [step for step in range(1, 26) if job.saves_after(step)] == after
