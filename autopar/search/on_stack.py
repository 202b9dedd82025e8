"""The prediction of a plan on another software stack than its own, as for an export that another system runs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.search.api import predict_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class OnStack:
    """What a step takes where ``stack`` runs it: seconds, and bytes of the rank that needs most."""

    stack: str
    step_time_s: float
    peak_memory_bytes: int


def predict_on_stack(captured: CapturedModel, cluster: Cluster, plan: Plan) -> OnStack:
    """captured: the model of ``plan``. cluster: its devices, with the stack that is asked about."""
    predicted = predict_plan(captured, cluster, plan)
    return OnStack(
        stack=cluster.device.stack.name,
        step_time_s=predicted.step_time_s,
        peak_memory_bytes=round(predicted.peak_bytes),
    )
