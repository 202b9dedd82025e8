"""A job travels as JSON, and to processes in other folders."""

from __future__ import annotations

from pathlib import Path

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
    job = TrainingJob(model=model, plan="p.yaml", steps=1, data="stdlib", save="run").with_absolute_paths()
    assert job.model == absolute.format(tmp_path)
    assert (job.plan, job.save, job.data, job.resume) == (f"{tmp_path}/p.yaml", f"{tmp_path}/run", "stdlib", None)
