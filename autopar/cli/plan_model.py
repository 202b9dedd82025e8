"""The model that a plan was made for, captured again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.ir.errors import InvalidInput, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file


def model_of(plan: Plan, plan_file: Path, model: str | None) -> str:
    """Where a plan's model is: as given, or as the plan says. Raises InvalidInput if neither says it."""
    named = model or plan.model.source
    if named is None:
        raise InvalidInput(
            f"{plan_file} does not say where its model is\n  try: --model file.py, or --model file.py:name"
        )
    return named


def capture_for(
    plan: Plan, plan_file: Path, named: str, seq: int | None, *, progress: Callable[[str], object]
) -> CapturedModel:
    """The model ``named``, with the plan's batch and sequence length. Raises PlanMismatch if it is another one."""
    source = load_model_file(named)
    # Imported here so that a mistyped file is answered at once.
    from autopar.ir.capture.capture import capture
    from autopar.passes.normalise import normalise

    progress("capturing the model")
    inputs = source.meta_inputs(plan.planned_rows, seq or plan.model.seq)
    captured = normalise(capture(source.meta_model(), inputs, name=source.name))
    if captured.fingerprint != plan.model.fingerprint:
        raise PlanMismatch(
            f"{plan_file} is for {plan.model.name} ({plan.model.fingerprint}), {named} is {captured.name} "
            f"({captured.fingerprint})\n  try: --model and --seq of the search that made the plan, or search again"
        )
    return captured
