"""The passes of a step along time, as far as a plan's prediction tells."""

from __future__ import annotations

from autopar.cost_model.schedule.pipeline_simulator import Timeline, simulate
from autopar.ir.plan import Plan


def timeline_of(plan: Plan) -> Timeline | None:
    """The passes, simulated again from the stage times in the plan's prediction."""
    prediction = plan.prediction
    if prediction is None or len(prediction.stage_forward_s) != plan.num_stages:
        return None
    split = (prediction.stage_inputs_s, prediction.stage_weights_s) if prediction.stage_inputs_s else None
    return simulate(plan.pipelining, prediction.stage_forward_s, prediction.stage_backward_s, split)
