"""The intervals and the number of spare nodes that get most training done.

For numbers of steps between copies to partners, each a quarter more than the one before, and for none, the interval
between checkpoints is searched (``minimum``). Spares are as many as raise the training of a node most, spares counted:
another one would mostly wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from autopar.cost_model.goodput.closed_form import expected_shares, running_shares, with_missing_nodes
from autopar.cost_model.goodput.intervals import minimum
from autopar.cost_model.goodput.job import Job, Policy
from autopar.cost_model.goodput.protection_costs import Hazard, ProtectionCosts, hazards_of
from autopar.cost_model.goodput.spare_nodes import out_of_service
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.goodput import GoodputPrediction

# A checkpoint a day at least, whatever the rates say: they know nothing of mistakes of people.
LONGEST_S = 86_400.0


def predicted_goodput(job: Job, cluster: Cluster) -> GoodputPrediction:
    """What the job gets done on the cluster under the best policy, with the spares that the cluster has, if it says."""
    costs, hazards = ProtectionCosts.of(job, cluster), hazards_of(job, cluster)
    policy = best_policy(job, costs, hazards, spare_nodes=cluster.spare_nodes)
    shares = expected_shares(job, policy, costs, hazards)
    return GoodputPrediction(
        goodput=min(1.0, shares.training),
        effective_tokens_per_day=86_400 * job.tokens_per_step / job.step_time_s * shares.training,
        failures_per_day=86_400 * sum(hazard.rate_per_s for hazard in hazards),
        checkpoint_every_steps=policy.checkpoint_steps,
        checkpoint_every_s=policy.checkpoint_steps * job.step_time_s,
        replicate_every_steps=policy.replica_steps,
        spare_nodes=policy.spare_nodes,
        shares=shares,
    )


def best_policy(
    job: Job,
    costs: ProtectionCosts,
    hazards: Sequence[Hazard],
    *,
    replicas: bool = True,
    replans: bool = True,
    spare_nodes: int | None = None,
) -> Policy:
    """The intervals, and the number of spares if it is not given. replicas: whether copies on other nodes may be used;
    there are none for a job on one node."""

    def training(policy: Policy) -> float:
        return running_shares(job, policy, costs, hazards).training

    with_intervals = _with_checkpoints(job, Policy(checkpoint_steps=1), costs, hazards)
    if replicas and job.num_nodes > 1:
        with_intervals = max(with_intervals, _with_copies(job, costs, hazards, training), key=training)
    policy = replace(with_intervals, replans=replans, spare_nodes=spare_nodes or 0)
    return policy if spare_nodes is not None else _with_spares(job, policy, costs, hazards)


def _with_copies(
    job: Job, costs: ProtectionCosts, hazards: Sequence[Hazard], training: Callable[[Policy], float]
) -> Policy:
    """With the best intervals between copies on other hosts and between checkpoints."""
    best, copies = None, 1
    while best is None or copies * job.step_time_s <= LONGEST_S:
        tried = _with_checkpoints(job, Policy(checkpoint_steps=1, replica_steps=copies), costs, hazards)
        if best is not None and training(tried) <= training(best):
            break
        best, copies = tried, max(copies + 1, copies * 5 // 4)
    return best


def _with_checkpoints(job: Job, policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard]) -> Policy:
    """With the best interval between checkpoints."""
    # One checkpoint is written at a time, and is of no use where a partner has a newer copy.
    fewest = max(1, policy.replica_steps or 1, ceil(costs.write_s / job.step_time_s))
    most = max(fewest, int(LONGEST_S / job.step_time_s))

    def lost(steps: float) -> float:
        return -running_shares(job, policy, costs, hazards, checkpoint_steps=steps).training

    steps = most if fewest == most else minimum(lost, fewest, most)
    return replace(policy, checkpoint_steps=min(most, max(fewest, round(steps))))


def _with_spares(job: Job, policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard]) -> Policy:
    """With the number of spares that raises the training of a node, spares counted, most."""
    missing = out_of_service(hazards, costs.repair_s)

    def training(spares: int) -> float:
        tried = replace(policy, spare_nodes=spares)
        speed, replanning, waiting = with_missing_nodes(job, tried, costs, hazards, missing)
        return speed * (1 - replanning - waiting) / (job.num_nodes + spares)

    return replace(policy, spare_nodes=max(range(len(missing)), key=training))
