"""``make demo``: search plans for four ranks, train examples/gpt.py under each, compare with one process.

One capture of the model serves three searches: a free one, one for a pipeline of tensor-parallel stages, and one
that shards both the batch and the sequence. Each plan is printed, written to out/
with a page about it, and trained on four gloo processes beside the same training on one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.launching.launch import launch
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.planning import Planned
from autopar.report.page import plan_report
from autopar.report.study import study_found
from autopar.report.terminal import print_plan
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.training.job import TrainingJob
from autopar.training.report import TOLERANCE

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out"
MODEL = ROOT / "examples" / "gpt.py"
NUM_RANKS = 4
STEPS = 30

# Name of the files -> what is pinned, and in words.
PLANS: dict[str, tuple[Constraints, str]] = {
    "plan": (Constraints(), "whatever the search finds best"),
    "plan-pp2-tp2": (
        Constraints(pp=2, tp=2, dp=1, sequence_parallel=False, num_microbatches=4),
        "a pipeline of two stages, tensor parallelism inside them",
    ),
    "plan-dp2-cp2": (
        Constraints(pp=1, dp=2, cp=2),
        "data parallelism, and the sequence sharded over a second axis",
    ),
}


def main() -> int:
    """The exit code: 0 if every plan trained as one process does."""
    start = time.perf_counter()
    console = Console(highlight=False)
    OUT.mkdir(exist_ok=True)
    source = load_model_file(str(MODEL))
    console.rule("capture")
    captured = normalise(capture(source.meta_model(), source.meta_inputs(), name=source.name))
    workload = Workload.of(captured, "fp32")
    capture_time_s = time.perf_counter() - start
    console.print(f"{source.name}: {len(captured.graph.nodes)} nodes, {len(workload.repetition.blocks)} blocks of "
                  f"{len(workload.repetition.kinds)} kinds, {capture_time_s:.1f} s")  # fmt: skip
    cluster = make_cluster("cpu", NUM_RANKS)
    for name, (constraints, words) in PLANS.items():
        console.rule(f"search: {words}")
        result = search_captured(captured, cluster, constraints, workload=workload)
        planned = Planned(result=result, capture_time_s=capture_time_s, captured=captured, constraints=constraints)
        planned.plan.save(OUT / f"{name}.yaml")
        plan_report(study_found(planned, vary=name == "plan"), OUT / f"{name}.html")
        print_plan(planned.plan, planned, console=console)
    failed = []
    for name, (_, words) in PLANS.items():
        console.rule(f"train: {words}")
        job = TrainingJob(model=str(MODEL), plan=str(OUT / f"{name}.yaml"), steps=STEPS, compare_single=True)
        if launch(job):
            failed.append(name)
    console.rule()
    console.print(f"reports: {', '.join(str((OUT / f'{name}.html').relative_to(ROOT)) for name in PLANS)}")
    passed = f"every plan trains as one process does, within {TOLERANCE:.0e}"
    verdict = f"FAILED: {', '.join(failed)}" if failed else passed
    console.print(f"{verdict}; {time.perf_counter() - start:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
