"""The training job that launchers start: ``autopar train --keep-alive --job`` under the plan itself."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from autopar.export.exported import Options
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.training.job import TrainingJob

RESTARTS = 3
"""How often a job that has failed is started again, where the system that starts it does that. What happens to ranks is
no failure of the job: its supervisors start them again."""
GRACE_S = 120
"""Seconds between the notice that a job is to leave and its end: for a step and a checkpoint."""
SHUTDOWN_S = GRACE_S - 20
"""Seconds that torchrun gives its processes of it."""
_KEPT = 2
"""Checkpoints that stay, so that a damaged one has another beside it."""
_UNFIT = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 40


def training_job(plan: Plan, options: Options, target: str, folder: str | None = None) -> TrainingJob:
    """A supervised job that starts, or goes on from its checkpoints in ``folder`` (None: of its own name).

    Raises InvalidInput if neither the plan nor the user says what to train.
    """
    model = options.model or plan.model.source
    if model is None:
        raise InvalidInput(
            f"the plan does not say where its model is, which a job for {target} trains.\n"
            "  try: --model file.py, or --model file.py:name"
        )
    return TrainingJob(
        model=model,
        plan=options.plan_path,
        steps=options.steps,
        seq_len=plan.model.seq,
        job=folder or job_name(plan),
        keep=_KEPT,
        keep_alive=True,
    )


def as_argument(job: TrainingJob) -> str:
    """The argument of ``python -m autopar.launching``; what is left at its default is left out."""
    plain = asdict(TrainingJob(model="", plan="", steps=0))
    given = {
        key: value for key, value in asdict(job).items() if key in ("model", "plan", "steps") or value != plain[key]
    }
    return json.dumps(given)


def job_name(plan: Plan) -> str:
    """The model's name as schedulers and Kubernetes take names: small letters, digits and dashes."""
    name = _UNFIT.sub("-", plan.model.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return f"autopar-{name}" if name else "autopar"
