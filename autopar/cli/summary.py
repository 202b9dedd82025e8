"""The object that ``--json`` prints."""

from __future__ import annotations

from typing import Any

from autopar.planning import Planned
from autopar.report.divided import divided_data
from autopar.report.words import microbatch_size, remat_level

# Every key, in order; all but ``feasible`` are null where no plan fits.
KEYS = (
    "step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_memory_bytes",
    "host_activation_bytes", "fit_probability", "feasible", "pp",
    "cluster", "mesh", "schedule", "virtual_stages", "microbatch_size", "num_microbatches", "zero", "remat",
    "capture_time_s", "search_time_s", "optimality_gap", "breakdown_s", "divided", "lengths",
    "goodput",
)  # fmt: skip


def summary(planned: Planned) -> dict[str, Any]:
    """A found plan as one JSON-ready mapping: its prediction, and how it was found."""
    plan = planned.plan
    prediction = plan.prediction
    assert prediction is not None, "the search predicts what it returns"
    values = {
        "step_time_s": prediction.step_time_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": prediction.model_tflops_per_gpu,
        "mfu": prediction.mfu,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "host_activation_bytes": max(prediction.stage_host_bytes or [0]),
        "fit_probability": prediction.fit_probability,
        "feasible": True,
        "pp": plan.num_pipeline_ranks,
        "cluster": plan.cluster.model_dump(),
        "mesh": dict(plan.mesh),
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "microbatch_size": microbatch_size(plan),
        "num_microbatches": plan.batch.num_microbatches,
        "zero": plan.zero,
        "remat": remat_level(plan),
        "capture_time_s": planned.capture_time_s,
        "search_time_s": planned.result.search_time_s,
        "optimality_gap": planned.result.optimality_gap,
        "breakdown_s": dict(prediction.breakdown_s),
        "divided": divided_data(planned.divided()),
        "lengths": None if prediction.lengths is None else prediction.lengths.model_dump(),
        "goodput": None if prediction.goodput is None else prediction.goodput.model_dump(),
    }
    return {key: values[key] for key in KEYS}


def infeasible_summary(reason: str) -> dict[str, Any]:
    """The mapping of ``summary`` where nothing fits, with the ``reason``."""
    return {**dict.fromkeys(KEYS), "feasible": False, "reason": reason}
