"""Slurm: a batch script that starts torchrun on every node, which runs ``autopar.launching`` or the user's
program."""

from __future__ import annotations

from autopar.export.exported import Exported, Options, commented
from autopar.export.jobs import GRACE_S, RESTARTS, SHUTDOWN_S, job_name, training_job
from autopar.export.nodes import nodes_of
from autopar.export.rendering import render
from autopar.export.strategy import Strategy


def write(strategy: Strategy, options: Options) -> Exported:
    """Nothing of the plan is lost: the job runs it. Raises InvalidInput if there is no model to train."""
    plan = strategy.plan
    job, nodes = training_job(plan, options, "slurm"), nodes_of(plan)
    notes = [
        f"{job.plan} and {job.model} are read on every node, from the folder in which the job is submitted.",
        f"Checkpoints are in {job.job}/ there, from which the job goes on when it is requeued or submitted again.",
        f"{GRACE_S} s before its time is over, or when the site takes its nodes, the job saves and is queued again.",
        "Add what the site asks for (--partition, --account, --time, --constraint) to sbatch or to the script.",
    ]
    if nodes.ranks_each < plan.cluster.gpus_per_node and nodes.count > 1:
        notes.append(
            f"{nodes.ranks_each} ranks on each node, which has {plan.cluster.gpus_per_node} devices: more do not "
            f"divide {plan.num_ranks} ranks."
        )
    text = render(
        "train.sbatch.jinja",
        head=commented(
            notes,
            f"{plan.model.name} under an autopar plan: {strategy.in_words()}.\nWritten by autopar export --to slurm.",
        ),
        name=job_name(plan),
        nodes=nodes,
        job=job,
        world=plan.num_ranks,
        grace_s=GRACE_S,
        shutdown_s=SHUTDOWN_S,
        restarts=RESTARTS,
    )
    return Exported(target="slurm", name="train.sbatch", text=text, notes=tuple(notes))
