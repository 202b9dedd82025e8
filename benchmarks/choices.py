"""What the search, left free, picks where practice knows the answer, and what the alternatives would have cost.

    python benchmarks/choices.py [--cases "fits easily,slow network"]

Each case is a model and a cluster of true size; nothing is pinned. The alternatives are searched too, with the degrees
in question pinned and the rest free. Exits with 1 where the pick is not the expected one or loses to an alternative.
Predictions, no measurements.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints, role_of_axis

EXAMPLES = Path(__file__).parent.parent / "examples"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """expected: whether a plan is what practice would use. alternatives: what is compared with, by name."""

    name: str
    model: str
    batch: int
    seq: int
    cluster: Callable[[], Cluster]
    expected: Callable[[Plan], bool]
    alternatives: dict[str, dict[str, Any]] = field(default_factory=dict)


def roles(plan: Plan) -> dict[str, int]:
    """Role (dp, tp, cp, ep) -> degree, as the names of the plan's axes say."""
    found: dict[str, int] = {}
    for name, size in plan.mesh.items():
        role = role_of_axis(name)
        found[role] = found.get(role, 1) * size
    return found


def factors(plan: Plan, axis: str) -> set[str]:
    """Factors that any op of the plan puts on an axis of this role."""
    return {
        factor
        for block in plan.blocks
        for axes in block.ops.values()
        for name, factor in axes.items()
        if role_of_axis(name) == axis
    }


def slow(cluster: Cluster, gigabytes_a_second: float) -> Cluster:
    """The cluster with another network between its nodes."""
    return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=gigabytes_a_second * 1e9))


CASES = (
    Case(
        name="fits easily",
        model=str(EXAMPLES / "gpt.py"),
        batch=256,
        seq=1024,
        cluster=lambda: make_cluster("h100-sxm", 8, 8),
        expected=lambda plan: plan.num_stages == 1 and roles(plan) == {"dp": 8} and plan.zero == 0,
        alternatives={"zero 3": {"dp": 8, "zero": 3}, "tp 8": {"tp": 8}, "pp 2": {"pp": 2}},
    ),
    Case(
        name="optimiser state does not fit",
        model=str(EXAMPLES / "llama3_8b.py"),
        batch=64,
        seq=4096,
        cluster=lambda: make_cluster("a100-80gb", 8, 8),
        expected=lambda plan: plan.zero > 0 and "dp" in roles(plan),
        alternatives={"dp 8, zero 0": {"dp": 8, "zero": 0}, "tp 8": {"tp": 8}, "pp 8": {"pp": 8}},
    ),
    Case(
        name="70B",
        model=str(EXAMPLES / "llama3_70b.py"),
        batch=512,
        seq=4096,
        cluster=lambda: make_cluster("a100-80gb", 64, 8),
        expected=lambda plan: (
            {"dp", "tp"} <= set(roles(plan)) and roles(plan)["tp"] <= 8 and "d1" in factors(plan, "tp")
        ),
        alternatives={"zero 3 alone": {"dp": 64, "zero": 3, "pp": 1}, "pp 8, dp 8": {"pp": 8, "dp": 8}},
    ),
    Case(
        name="slow network",
        model=str(EXAMPLES / "llama3_8b.py"),
        batch=64,
        seq=4096,
        cluster=lambda: slow(make_cluster("a100-80gb", 16, 4), 0.2),
        expected=lambda plan: plan.num_stages > 1,
        alternatives={"no pipeline": {"pp": 1}},
    ),
    Case(
        name="128K tokens",
        model=str(EXAMPLES / "llama3_8b.py"),
        batch=1,
        seq=131_072,
        cluster=lambda: make_cluster("h100-sxm", 16, 8),
        expected=lambda plan: "cp" in roles(plan),
        alternatives={"tp 8, pp 2": {"tp": 8, "pp": 2}, "pp 16": {"pp": 16}},
    ),
    Case(
        name="large mixture of experts",
        model=str(EXAMPLES / "mixtral_8x7b.py"),
        batch=128,
        seq=4096,
        cluster=lambda: make_cluster("h100-sxm", 64, 8),
        expected=lambda plan: (
            "ep" in roles(plan) or any("experts" in f for axis in plan.mesh for f in factors(plan, axis))
        ),
        alternatives={"no expert parallelism": {"ep": 1}},
    ),
)


def describe(plan: Plan) -> str:
    mesh = " ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1)
    pipeline = f"pp {plan.num_pipeline_ranks} ({plan.schedule}) " if plan.num_stages > 1 else ""
    return f"{pipeline}{mesh}, zero {plan.zero}, {plan.batch.num_microbatches} microbatches"


def run(case: Case) -> bool:
    """Search the case and its alternatives, print a row each. Returns whether the pick is as expected and best."""
    source = load_model_file(case.model)
    captured = normalise(capture(source.meta_model(), source.meta_inputs(case.batch, case.seq), name=source.name))
    cluster = case.cluster()
    base = Constraints(precision="bf16")
    picked = search_captured(captured, cluster, base).plan
    assert picked.prediction is not None
    best = picked.prediction.step_time_s
    good = case.expected(picked)
    memory = picked.prediction.peak_memory_bytes / GIB
    print(
        f"| {case.name} | **{describe(picked)}** | {best:.3g} s | {memory:.1f} GiB | {'' if good else 'not expected'} |"
    )
    for name, pinned in case.alternatives.items():
        try:
            other = search_captured(captured, cluster, replace(base, **pinned)).plan.prediction
        except InfeasiblePlan as error:
            print(f"| | {name} | does not fit | | {str(error).splitlines()[0]} |", flush=True)
            continue
        assert other is not None
        ratio = other.step_time_s / best
        good = good and ratio > 0.995
        print(
            f"| | {name} | {other.step_time_s:.3g} s | {other.peak_memory_bytes / GIB:.1f} GiB | {ratio:.2f} × |",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [case for case in CASES if case.name in options.cases.split(",")]
    print("| case | plan | step | memory | against the pick |\n|---|---|---|---|---|")
    results = [run(case) for case in wanted]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
