"""Plans and commands that the tests of launching share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, StagePlan
from tests import patience

ROOT = Path(__file__).parents[2]
_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def plan_of(ranks: int, per_node: int, *, gpu: str = "cpu") -> Plan:
    """Data parallelism of a model of one block; good for starting ranks, not for training."""
    return Plan(
        model=ModelRef(name="none", fingerprint="none"),
        cluster=ClusterRef(gpu=gpu, num_gpus=ranks, gpus_per_node=per_node),
        batch=Batch(global_size=ranks),
        mesh={"dp": ranks},
        inputs=["dp"],
        blocks=[BlockPlan(name="block")],
        stages=[StagePlan(first=0, last=0)],
    )


def environ(**more: str) -> dict[str, str]:
    """For processes that are to find this checkout, and no job that the tests run in."""
    own = {name: value for name, value in os.environ.items() if name not in _JOB}
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    return own | quiet | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return patience.run(*command, env=environ(), cwd=ROOT)
