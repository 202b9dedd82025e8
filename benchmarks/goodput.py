"""What failures leave of a run of Llama 3.1 405B on 16,384 H100 over 54 days, by how it is protected.

    python benchmarks/goodput.py [--runs 20] [--days 54] [--jobs 2]

The step is that of the plan that the search finds for ``examples/llama31_405b.py``; failures come as often as in Llama
3's pre-training (``cost_model/hardware/failure_rates.py``), planned ones too. Of each policy: the closed form's
share of time spent training, the mean and the standard deviation of simulated runs, and the parts of the rest. Nothing
is fitted to the share that Meta reports, "higher than 90 %".
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.goodput.choose import best_policy
from autopar.cost_model.goodput.closed_form import expected_shares
from autopar.cost_model.goodput.intervals import daly_s, young_s
from autopar.cost_model.goodput.job import Job, Policy
from autopar.cost_model.goodput.protection_costs import Hazard, ProtectionCosts, hazards_of
from autopar.cost_model.goodput.simulation import Simulated, drawn_faults, simulate_run
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.failure_rates import OBSERVED_DAYS, PLANNED_INTERRUPTIONS, FailureKind
from autopar.ir.goodput import TimeParts
from autopar.load_model import load_model_file
from autopar.planning import find_plan
from autopar.report.words import one_line
from autopar.search.predict.kept_state import model_state_bytes
from autopar.search.problem.constraints import Constraints

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama31_405b.py"
GPUS, BATCH, SEQ = 16_384, 2048, 8192
# PyTorch's limit of a NCCL collective, after which ranks end that nobody has told of a failure.
COLLECTIVE_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    policy: Policy
    costs: ProtectionCosts


def found_job(cluster: Cluster) -> Job:
    """The run of the plan that the search finds."""
    source = load_model_file(str(EXAMPLE))
    planned = find_plan(
        source.meta_model(),
        cluster,
        source.meta_inputs(BATCH, SEQ),
        constraints=Constraints(precision="bf16"),
        name=source.name,
    )
    plan, result = planned.plan, planned.result
    print(f"plan: {one_line(plan)}, {result.predicted.step_time_s:.2f} s a step")
    return Job(
        step_time_s=result.predicted.step_time_s,
        tokens_per_step=BATCH * SEQ,
        num_gpus=GPUS,
        gpus_per_node=cluster.gpus_per_node,
        state_bytes=result.predicted.state(),
        checkpoint_bytes=model_state_bytes(result.workload),
        data_parallel_size=plan.data_parallel_size,
        num_microbatches=plan.batch.num_microbatches,
    )


def cases_of(job: Job, costs: ProtectionCosts, hazards: Sequence[Hazard]) -> list[Case]:
    """Policies, from the least protected on."""
    unwatched = replace(costs, detection_s=COLLECTIVE_LIMIT_S)

    def case(name: str, own: ProtectionCosts = costs, **options: object) -> Case:
        return Case(name=name, policy=best_policy(job, own, hazards, **options), costs=own)  # type: ignore[arg-type]

    both = case("copies, spares, fewer ranks")
    hourly = max(1, round(3600 / job.step_time_s))
    spares = {"spare_nodes": both.policy.spare_nodes}
    return [
        case("disk, waits for repairs", unwatched, replicas=False, replans=False, spare_nodes=0),
        case("disk, fewer ranks", replicas=False, spare_nodes=0),
        Case(
            name="disk once an hour, spares, nobody watches",
            policy=Policy(checkpoint_steps=hourly, **spares),
            costs=unwatched,
        ),
        case("disk, spares, nobody watches", unwatched, replicas=False, **spares),
        case("disk, spares", replicas=False, **spares),
        case("copies, waits for repairs", replans=False, spare_nodes=0),
        case("copies, fewer ranks", spare_nodes=0),
        case("copies, spares, waits", replans=False, **spares),
        both,
        Case(name="the same, partners two nodes on", policy=_apart(job, costs, hazards, both.policy), costs=costs),
    ]


def _apart(job: Job, costs: ProtectionCosts, hazards: Sequence[Hazard], policy: Policy) -> Policy:
    """With partners behind another switch, and checkpoints as often as is best then."""
    tried = (replace(policy, partner_distance=2, checkpoint_steps=steps) for steps in range(100, 10_000, 100))
    return max(tried, key=lambda one: expected_shares(job, one, costs, hazards).training)


def simulated(job: Job, case: Case, hazards: Sequence[Hazard], days: float, seed: int) -> Simulated:
    faults = drawn_faults(job, case.costs, hazards, days=days, seed=seed)
    return simulate_run(job, case.policy, case.costs, faults, days=days)


def row(case: Case, expected: TimeParts, runs: Sequence[Simulated], job: Job) -> str:
    """A row of the table."""
    goodputs = [100 * one.seconds.goodput for one in runs]
    parts = sum((one.seconds for one in runs), TimeParts()).shares().by_name()
    tokens = 86_400 * job.tokens_per_step / job.step_time_s * expected.training
    copies = case.policy.replica_steps
    shown = (f"{100 * parts[name]:.2f}" for name in list(parts)[1:])
    return (
        f"| {case.name} | {case.policy.checkpoint_steps * job.step_time_s / 60:.0f} min | {copies or '–'} "
        f"| {case.policy.spare_nodes} | {100 * expected.training:.2f} | {mean(goodputs):.2f} ± {stdev(goodputs):.2f} "
        f"| {tokens / 1e9:.0f} | {' | '.join(shown)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="simulated runs of each policy")
    parser.add_argument("--days", type=float, default=float(OBSERVED_DAYS))
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    cluster = make_cluster("h100-sxm", GPUS)
    job = found_job(cluster)
    costs = ProtectionCosts.of(job, cluster)
    planned = FailureKind(
        name="planned",
        of="job",
        mean_hours=OBSERVED_DAYS * 24 / PLANNED_INTERRUPTIONS,
        lost_nodes=0,
        announced=True,
    )
    hazards = (
        *hazards_of(job, cluster),
        Hazard(kind=planned, rate_per_s=planned.rate_per_s(job.num_gpus, job.num_nodes)),
    )
    failing = sum(hazard.rate_per_s for hazard in hazards)
    print(
        f"interruptions: {86_400 * given.days * failing:.0f} expected in {given.days:g} days; state "
        f"{job.state_bytes / 1e9:.2f} GB a rank, {job.checkpoint_bytes / 1e12:.2f} TB in all\n{costs}\n"
        f"from disk alone, Young {young_s(costs.checkpoint_stall_s, 1 / failing):.0f} s, Daly "
        f"{daly_s(costs.checkpoint_stall_s, 1 / failing):.0f} s between checkpoints\n"
    )
    names = [
        "policy",
        "checkpoint",
        "steps to a copy",
        "spares",
        "closed form %",
        "simulated %",
        "10⁹ tokens a day",
    ]
    parts = [name.replace("_", " ") for name in TimeParts.model_fields][1:]
    print(f"| {' | '.join(names + parts)} |\n|{'---|' * (len(names) + len(parts))}")
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("fork")) as pool:
        for case in cases_of(job, costs, hazards):
            waiting = [pool.submit(simulated, job, case, hazards, given.days, seed) for seed in range(given.runs)]
            runs = [one.result() for one in waiting]
            print(row(case, expected_shares(job, case.policy, case.costs, hazards), runs, job), flush=True)


if __name__ == "__main__":
    main()
