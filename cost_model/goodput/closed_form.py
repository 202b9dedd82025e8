"""The expected shares of a long run's time, in closed form.

Failures of kind k come at random with rate r_k, r in all. In a second in which the job runs:

    saves         every period of t seconds of training ends with a checkpoint, which delays it by its stall; likewise
                  copies to partners
    lost work     r_k x (seconds since the newest snapshot that can be used), see ``expected_age_s``: of partners'
                  copies where they survive, else of checkpoints on disk
    recoveries    detection, restart and loading, D_k together. Another failure meanwhile begins them anew: an attempt
                  succeeds with probability exp(-r D_k), so there are 1 / sum_k (r_k / r) exp(-r D_k) of them

With one kind of failure, and checkpoints that are safe at once, this is Daly's complete model (2006, equation 20): the
run takes (e^(r (t + d)) - 1) e^(r R) / (r t) times its training. Missing nodes are apart from that: their number is in
``spare_nodes``, and the job waits, or runs with fewer ranks, in as large a share of time.

Left out: a second failure that takes the partner of a rank whose state is being recovered (the simulation has it), and
that fewer ranks fail less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from autopar.cost_model.goodput.intervals import expected_age_s
from autopar.cost_model.goodput.job import Job, Policy
from autopar.cost_model.goodput.protection_costs import Hazard, ProtectionCosts
from autopar.cost_model.goodput.spare_nodes import out_of_service
from autopar.ir.goodput import TimeParts


def expected_shares(job: Job, policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard]) -> TimeParts:
    """Shares of the time of a run that is long against its failures; they add up to 1."""
    running = running_shares(job, policy, costs, hazards)
    speed, replanning, waiting = with_missing_nodes(
        job, policy, costs, hazards, out_of_service(hazards, costs.repair_s)
    )
    ran = 1 - waiting - replanning
    training = running.training * ran
    return (running * ran).model_copy(
        update={
            "training": training * speed,
            "degraded": training * (1 - speed),
            "replanning": replanning,
            "waiting": waiting,
        }
    )


def running_shares(
    job: Job,
    policy: Policy,
    costs: ProtectionCosts,
    hazards: Sequence[Hazard],
    *,
    checkpoint_steps: float | None = None,
) -> TimeParts:
    """The same while no node is missing. checkpoint_steps: instead of the policy's, not necessarily a whole number."""
    steps, step = checkpoint_steps or policy.checkpoint_steps, job.step_time_s
    copying = 0.0
    if policy.replica_steps is not None:
        copying = costs.replica_stall_s(policy.replica_steps * step) / policy.replica_steps
    period = steps * (step + copying) + costs.checkpoint_stall_s
    rate = sum(hazard.rate_per_s for hazard in hazards)
    if not rate:
        lost, down = 0.0, TimeParts()
    else:
        lost, down = _lost(policy, costs, hazards, period, step + copying), _recoveries(policy, costs, hazards)
    lasting = (1.0 - lost) / period
    parts = TimeParts(
        training=lasting * steps * step,
        checkpoint=lasting * costs.checkpoint_stall_s,
        replicas=lasting * steps * copying,
        lost_work=lost,
    )
    return (parts + down).shares()


def _lost(policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard], period_s: float, step_s: float) -> float:
    """Seconds of work that are done again, for each second that the job runs."""
    unannounced = [hazard for hazard in hazards if not hazard.kind.announced]
    every = sum(hazard.rate_per_s for hazard in unannounced)
    disk = sum(hazard.rate_per_s for hazard in unannounced if policy.needs_disk(hazard.lost_nodes))
    lost = 0.0
    if policy.replica_steps is not None and every > disk:
        lost = (every - disk) * expected_age_s(every, policy.replica_steps * step_s, costs.copy_s)
    if disk:
        # A checkpoint's period is longer by what is done again from partners' copies inside it.
        lost += (1 - lost) * disk * expected_age_s(disk, period_s / (1 - lost), costs.write_s)
    return lost


def recovery_s(policy: Policy, costs: ProtectionCosts, hazard: Hazard) -> tuple[float, float]:
    """Seconds of detection, and from then until all ranks train again, if nothing else fails."""
    if hazard.kind.announced:
        return 0.0, costs.planned_restart_s(policy)
    return costs.detection_s, costs.restart_s + costs.load_s(from_disk=policy.needs_disk(hazard.lost_nodes))


def _recoveries(policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard]) -> TimeParts:
    """Seconds of recoveries for each second that the job runs."""
    rate = sum(hazard.rate_per_s for hazard in hazards)
    succeeding = detecting = restarting = 0.0
    for hazard in hazards:
        detection, restart = recovery_s(policy, costs, hazard)
        share = hazard.rate_per_s / rate
        detected, recovered = exp(-rate * detection), exp(-rate * (detection + restart))
        succeeding += share * recovered
        detecting += share * (1 - detected) / rate
        restarting += share * (detected - recovered) / rate
    attempts = rate / succeeding
    return TimeParts(detection=attempts * detecting, restart=attempts * restarting)


def with_missing_nodes(
    job: Job, policy: Policy, costs: ProtectionCosts, hazards: Sequence[Hazard], missing: Sequence[float]
) -> tuple[float, float, float]:
    """What it costs that more nodes are out of service than there are spares: the mean speed of the job while it
    trains, as a share of that on all ranks, and the shares of time in which it changes plans and in which it waits.

    missing: of ``out_of_service``.
    """
    levels = [job.level(number - policy.spare_nodes) for number in range(len(missing))]
    speeds = [job.speed(level) if policy.replans or not level else 0.0 for level in levels]
    waiting = sum(share for share, speed in zip(missing, speeds, strict=True) if not speed)
    if waiting >= 1:
        return 0.0, 0.0, 1.0
    speed = min(1.0, sum(share * speed for share, speed in zip(missing, speeds, strict=True)) / (1 - waiting))
    if not policy.replans:
        return speed, 0.0, waiting
    # As often as the job goes on with fewer ranks, it goes back to more, and starts again for that alone.
    changes_s = 2 * costs.replan_s + costs.planned_restart_s(policy)
    return speed, min(1 - waiting, _rate_of_fewer(job, policy, hazards, missing) * changes_s), waiting


def _rate_of_fewer(job: Job, policy: Policy, hazards: Sequence[Hazard], missing: Sequence[float]) -> float:
    """How often a second the job goes on with fewer data-parallel groups, of which some are left."""

    def level(number: int) -> int:
        return job.level(number - policy.spare_nodes)

    return sum(
        hazard.rate_per_s * share
        for hazard in hazards
        if hazard.lost_nodes
        for number, share in enumerate(missing)
        if level(number) < level(number + hazard.lost_nodes) < job.data_parallel_size
    )
