"""Runs simulated failure by failure, beside the closed form and beside runs worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.goodput.closed_form import expected_shares
from autopar.cost_model.goodput.job import Policy
from autopar.cost_model.goodput.protection_costs import Hazard
from autopar.cost_model.goodput.simulation import Fault, Simulated, drawn_faults, simulate_run
from autopar.ir.goodput import TimeParts
from tests.cost_model.goodput_jobs import NODE, PROCESS, RACK, costs, hazard, job

ALL = (PROCESS, NODE, RACK)
DAY = 86_400.0
PLAIN = costs(checkpoint_stall_s=0.0, write_s=0.0, copy_s=0.0, fetch_s=0.0)


def run(policy: Policy, *faults: Fault, days: float = 1000 / DAY, own=PLAIN) -> Simulated:
    return simulate_run(job(), policy, own, faults, days=days)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(checkpoint_steps=60, spare_nodes=64, replans=False),
        Policy(checkpoint_steps=200, replica_steps=1, spare_nodes=64),
        Policy(checkpoint_steps=200, replica_steps=8, spare_nodes=2, replans=False),
        Policy(checkpoint_steps=200, replica_steps=1, spare_nodes=0),
        Policy(checkpoint_steps=200, replica_steps=1, spare_nodes=2, partner_distance=2),
    ],
    ids=["disk and spares", "copies and spares", "copies, waits", "copies, fewer ranks", "copies, some spares"],
)
def test_the_closed_form_is_the_mean_of_simulated_runs(policy: Policy) -> None:
    hazards = (*ALL, hazard("planned", 50.0, announced=True))
    faults = drawn_faults(job(), costs(), hazards, days=600, seed=0)
    total = simulate_run(job(), policy, costs(), faults, days=600).seconds
    found, expected = total.shares(), expected_shares(job(), policy, costs(), hazards)
    assert total.total == pytest.approx(600 * DAY)
    # Missing nodes come and go within hours: 600 days are 2,400 independent looks at them, everything else is means of
    # thousands of failures.
    spread = 2 * (expected.waiting * (1 - expected.waiting) / 1200) ** 0.5
    assert found.training == pytest.approx(expected.training, abs=0.006 + spread)
    for name, share in expected.by_name().items():
        assert found.by_name()[name] == pytest.approx(share, rel=0.08, abs=0.003 + spread), name


def test_faults_come_as_often_as_their_rates_say_and_the_same_for_a_seed() -> None:
    faults = list(drawn_faults(job(), costs(), ALL, days=500, seed=1))
    assert faults == list(drawn_faults(job(), costs(), ALL, days=500, seed=1))
    assert faults != list(drawn_faults(job(), costs(), ALL, days=500, seed=2))
    expected: list[tuple[Hazard, int]] = [(PROCESS, 0), (NODE, 1), (RACK, 2)]
    for own, lost in expected:
        count = sum(fault.lost_nodes == lost for fault in faults)
        assert count == pytest.approx(own.rate_per_s * 500 * DAY, rel=0.1)
    assert all(fault.node % 2 == 0 and fault.node < 64 for fault in faults if fault.lost_nodes == 2)


def test_without_faults_all_whole_steps_last() -> None:
    found = run(Policy(checkpoint_steps=10), days=1004 / DAY)
    assert found.steps == 200
    assert found.seconds.by_name() == pytest.approx({**TimeParts().by_name(), "training": 1000, "lost_work": 4})


def test_from_disk_the_steps_since_the_checkpoint_are_lost() -> None:
    """Checkpoints after 50, 100 and 150 s; a failure at 187 s, 200 s of recovery; then 613 s are left."""
    found = run(Policy(checkpoint_steps=10), Fault(at_s=187, node=0, lost_nodes=0))
    parts = {"detection": 10, "restart": 190, "training": 150 + 610, "lost_work": 37 + 3}
    assert found.seconds.by_name() == pytest.approx({**TimeParts().by_name(), **parts})
    assert (found.failures, found.recoveries, found.from_disk, found.steps) == (1, 1, 1, 152)


def test_from_a_partners_copy_the_step_alone_is_lost() -> None:
    found = run(Policy(checkpoint_steps=10, replica_steps=1), Fault(at_s=187, node=0, lost_nodes=1))
    assert found.seconds.lost_work == pytest.approx(2 + 3)
    assert (found.seconds.restart, found.from_disk, found.steps) == (100, 0, 37 + 140)


def test_a_copy_or_a_checkpoint_that_is_not_complete_is_of_no_use() -> None:
    slow = replace(PLAIN, copy_s=3.0, write_s=40.0)
    copied = run(Policy(checkpoint_steps=10, replica_steps=1), Fault(at_s=187, node=0, lost_nodes=1), own=slow)
    assert copied.seconds.lost_work > 5
    saved = run(Policy(checkpoint_steps=10), Fault(at_s=187, node=0, lost_nodes=0), own=slow)
    assert saved.seconds.lost_work == pytest.approx(87 + 3)


def test_two_failures_that_take_a_rank_and_its_partner_leave_the_disk() -> None:
    policy = Policy(checkpoint_steps=10, replica_steps=1)
    apart, together = (
        run(policy, Fault(at_s=187, node=4, lost_nodes=1), Fault(at_s=230, node=node, lost_nodes=1)) for node in (9, 5)
    )
    assert (apart.from_disk, together.from_disk) == (0, 1)
    assert together.seconds.lost_work - apart.seconds.lost_work == pytest.approx(35)
    assert run(policy, Fault(at_s=187, node=4, lost_nodes=2)).from_disk == 1
    assert run(replace(policy, partner_distance=2), Fault(at_s=187, node=4, lost_nodes=2)).from_disk == 0


def test_a_failure_in_a_recovery_begins_it_anew() -> None:
    policy = Policy(checkpoint_steps=10, replica_steps=1)
    found = run(policy, Fault(at_s=100, node=0, lost_nodes=0), Fault(at_s=150, node=0, lost_nodes=0))
    assert (found.seconds.detection, found.seconds.restart) == (20, 40 + 100)
    assert (found.failures, found.recoveries) == (2, 1)


def test_a_job_without_spares_waits_for_the_repair() -> None:
    policy = Policy(checkpoint_steps=10, replica_steps=1, replans=False)
    lost = Fault(at_s=100, node=0, lost_nodes=1, repair_s=300)
    assert run(policy, lost).seconds.waiting == 290
    assert run(replace(policy, spare_nodes=1), lost).seconds.waiting == 0


def test_a_job_trains_on_fewer_ranks_until_the_node_is_back() -> None:
    """Detection, a plan for fewer and a restart end at 225 s; the node is back at 400 s."""
    lost = Fault(at_s=100, node=0, lost_nodes=1, repair_s=300)
    found = run(Policy(checkpoint_steps=10, replica_steps=1), lost)
    assert found.replans == 2
    assert found.seconds.replanning == 15 + 115
    slow_steps = int(175 / (5 * 9 / 8))
    assert found.seconds.degraded == pytest.approx(slow_steps * 5 / 8)
    assert found.steps == 20 + slow_steps + 97


def test_an_announced_end_loses_no_whole_step() -> None:
    found = run(Policy(checkpoint_steps=100), Fault(at_s=187, node=0, lost_nodes=0, announced=True))
    assert found.seconds.detection == 0
    assert found.seconds.lost_work < 10
