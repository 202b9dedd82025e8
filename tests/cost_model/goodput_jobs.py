"""Jobs, costs and failures of the tests of goodput."""

from __future__ import annotations

from autopar.cost_model.goodput.job import Job
from autopar.cost_model.goodput.protection_costs import Hazard, ProtectionCosts
from autopar.cost_model.hardware.failure_rates import FailureKind


def job(**changes: float) -> Job:
    """512 GPUs on 64 nodes, 16 data-parallel groups of 32."""
    return Job(
        **{
            "step_time_s": 5.0,
            "tokens_per_step": 4e6,
            "num_gpus": 512,
            "gpus_per_node": 8,
            "state_bytes": 10e9,
            "checkpoint_bytes": 1e12,
            "data_parallel_size": 16,
            "num_microbatches": 8,
            **changes,
        }  # type: ignore[arg-type]
    )


def costs(**changes: float) -> ProtectionCosts:
    return ProtectionCosts(
        **{
            "checkpoint_stall_s": 20.0,
            "write_s": 60.0,
            "copy_s": 0.5,
            "overlaps": True,
            "lost": 0.1,
            "fetch_s": 0.5,
            "read_s": 90.0,
            "detection_s": 10.0,
            "restart_s": 100.0,
            "replan_s": 15.0,
            "repair_s": 6 * 3600.0,
            **changes,
        }  # type: ignore[arg-type]
    )


def hazard(name: str, hours: float, lost_nodes: int = 0, *, announced: bool = False) -> Hazard:
    """A failure of the whole job each ``hours``."""
    kind = FailureKind(name=name, of="job", mean_hours=hours, lost_nodes=lost_nodes, announced=announced)
    return Hazard(kind=kind, rate_per_s=kind.rate_per_s(512, 64))


PROCESS, NODE, RACK = hazard("process", 6.0), hazard("node", 4.0, 1), hazard("rack", 30.0, 2)
