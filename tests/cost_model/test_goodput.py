"""Goodput in closed form, the intervals and spares that it picks, and what a cluster file says of failures."""

from __future__ import annotations

from dataclasses import replace
from math import exp, expm1

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.goodput.choose import LONGEST_S, best_policy, predicted_goodput
from autopar.cost_model.goodput.closed_form import expected_shares, running_shares
from autopar.cost_model.goodput.intervals import daly_s, expected_age_s, minimum, young_s
from autopar.cost_model.goodput.job import Policy
from autopar.cost_model.goodput.protection_costs import ProtectionCosts, hazards_of
from autopar.cost_model.goodput.spare_nodes import out_of_service, poisson
from autopar.cost_model.hardware.failure_rates import INTERRUPTIONS, OBSERVED
from autopar.ir.errors import InvalidCluster
from autopar.ir.goodput import TimeParts
from tests.cost_model.goodput_jobs import NODE, PROCESS, RACK, costs, hazard, job

ALL = (PROCESS, NODE, RACK)
DISK = Policy(checkpoint_steps=100, spare_nodes=64)


def test_the_table_of_llama_3_adds_up() -> None:
    assert sum(sum(own.values()) for own in INTERRUPTIONS.values()) == 419
    failures = sum(kind.rate_per_s(16_384, 2_048) for kind in OBSERVED.kinds) * 54 * 86_400
    assert failures == pytest.approx(419)


def test_without_failures_only_saves_cost_anything() -> None:
    found = expected_shares(job(), DISK, costs(), ())
    assert found.goodput == pytest.approx(500 / 520)
    assert expected_shares(job(), DISK, costs(checkpoint_stall_s=0.0), ()) == TimeParts(training=1.0)


def test_it_is_dalys_model_where_a_checkpoint_is_safe_at_once() -> None:
    rate, interval, save, recovery = PROCESS.rate_per_s, 500.0, 20.0, 200.0
    expected = rate * interval * exp(-rate * recovery) / expm1(rate * (interval + save))
    found = expected_shares(job(), DISK, costs(write_s=0.0), (PROCESS,))
    assert found.training == pytest.approx(expected, rel=1e-9)
    assert found.total == pytest.approx(1.0)


@pytest.mark.parametrize(
    "policy", [DISK, replace(DISK, replica_steps=1), replace(DISK, replica_steps=4, spare_nodes=0)]
)
def test_shares_add_up_to_one(policy: Policy) -> None:
    assert expected_shares(job(), policy, costs(), ALL).total == pytest.approx(1.0)


@pytest.mark.parametrize(
    "worse",
    [{"checkpoint_stall_s": 40.0}, {"write_s": 200.0}, {"read_s": 300.0}, {"detection_s": 600.0}, {"restart_s": 500.0},
     {"repair_s": 48 * 3600.0}],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_goodput_falls_with_every_cost(worse: dict[str, float]) -> None:
    policy = replace(DISK, spare_nodes=4)
    assert expected_shares(job(), policy, costs(**worse), ALL).training < (
        expected_shares(job(), policy, costs(), ALL).training
    )


@given(st.floats(0.5, 200.0), st.floats(1.01, 10.0))
def test_goodput_falls_as_failures_come_more_often(hours: float, factor: float) -> None:
    rarely, often = ((hazard("any", mean, 1),) for mean in (hours, hours / factor))
    for policy in (DISK, replace(DISK, replica_steps=1), replace(DISK, spare_nodes=1)):
        assert expected_shares(job(), policy, costs(), often).training <= (
            expected_shares(job(), policy, costs(), rarely).training
        )


def test_an_announced_failure_costs_a_restart_and_no_work() -> None:
    found = expected_shares(job(), DISK, costs(), (hazard("planned", 6.0, announced=True),))
    assert found.lost_work == found.detection == 0
    rate = 1 / (6 * 3600)
    assert found.restart == pytest.approx(expm1(rate * 250) / (1 + expm1(rate * 250)))


def test_copies_on_other_hosts_save_work_where_one_node_fails_and_not_where_two_do() -> None:
    copied = replace(DISK, replica_steps=1)
    assert expected_shares(job(), copied, costs(), (NODE,)).lost_work < 0.002
    far = replace(copied, partner_distance=2)
    neighbours, apart = (expected_shares(job(), policy, costs(), (RACK,)).lost_work for policy in (copied, far))
    assert neighbours == pytest.approx(expected_shares(job(), DISK, costs(), (RACK,)).lost_work, rel=0.01)
    assert apart < neighbours / 20


def test_a_copy_that_no_step_hides_delays_training() -> None:
    assert costs(copy_s=2.0).replica_stall_s(5.0) == pytest.approx(2 * 0.1)
    assert costs(copy_s=9.0).replica_stall_s(5.0) == pytest.approx(4 + 5 * 0.1)
    assert replace(costs(copy_s=2.0), overlaps=False).replica_stall_s(5.0) == 2.0


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0))
def test_age_of_the_newest_snapshot_is_the_sum_over_snapshots(period: float, latency: float) -> None:
    usable = period * sum(exp(-n * period - latency) for n in range(1, int(40 / period) + 2))
    assert expected_age_s(1.0, period, latency) == pytest.approx(1 - usable)
    assert expected_age_s(1e-3, 1e3 * period, 1e3 * latency) == pytest.approx(1e3 * (1 - usable))


def test_age_of_the_newest_snapshot_where_failures_are_rare() -> None:
    for rate in (1e-6, 1.1e-7, 0.9e-7, 1e-12):
        assert expected_age_s(rate, 60.0, 30.0) == pytest.approx(60.0, rel=2e-4)


def test_young_and_daly_are_near_the_minimum_where_failures_are_rare() -> None:
    failing = hazard("process", 48.0)
    found = best_policy(job(step_time_s=0.5), costs(write_s=0.0), (failing,), replicas=False, spare_nodes=0)
    interval = found.checkpoint_steps * 0.5
    assert young_s(20.0, 48 * 3600.0) == pytest.approx(interval, rel=0.02)
    assert daly_s(20.0, 48 * 3600.0) == pytest.approx(interval, rel=0.005)
    assert daly_s(50.0, 20.0) == 20.0


@pytest.mark.parametrize("hazards", [(PROCESS,), (NODE, RACK), ALL], ids=len)
@pytest.mark.parametrize("replicas", [True, False])
def test_the_picked_intervals_are_the_best_of_all(hazards: tuple, replicas: bool) -> None:
    picked = best_policy(job(), costs(), hazards, replicas=replicas, spare_nodes=0)
    best = running_shares(job(), picked, costs(), hazards).training
    for copies in (None, 1, 2, 3, 6, 24) if replicas else (None,):
        for steps in [*range(12, 120), *range(120, 3000, 20)]:
            other = Policy(checkpoint_steps=max(steps, copies or 1), replica_steps=copies)
            assert running_shares(job(), other, costs(), hazards).training <= best + 1e-7


def test_copies_are_rare_where_steps_are_short() -> None:
    found = best_policy(job(step_time_s=1e-3), costs(copy_s=1e-2), ALL)
    assert found.replica_steps is not None
    assert 0.1 < found.replica_steps * 1e-3 < 100
    for steps in (1, found.replica_steps // 2, found.replica_steps * 2, 10**6):
        other = replace(found, replica_steps=steps, checkpoint_steps=max(steps, found.checkpoint_steps))
        assert running_shares(job(step_time_s=1e-3), other, costs(copy_s=1e-2), ALL).training < (
            running_shares(job(step_time_s=1e-3), found, costs(copy_s=1e-2), ALL).training
        )


def test_a_checkpoint_is_written_before_the_next_and_one_a_day_at_least() -> None:
    cheap = best_policy(job(), costs(checkpoint_stall_s=0.0, write_s=301.0), (PROCESS,), spare_nodes=0, replicas=False)
    assert cheap.checkpoint_steps == 61
    assert best_policy(job(), costs(), ()).checkpoint_steps == pytest.approx(LONGEST_S / 5, rel=1e-3)


def test_minimum_of_a_curve() -> None:
    assert minimum(lambda x: x + 100 / x, 1e-3, 1e6) == pytest.approx(10, rel=2e-3)


@pytest.mark.parametrize("mean", [0.0, 0.3, 21.7, 900.0])
def test_poisson_probabilities(mean: float) -> None:
    found = poisson(mean)
    assert sum(found) == pytest.approx(1)
    assert sum(n * p for n, p in enumerate(found)) == pytest.approx(mean, abs=1e-9)


def test_nodes_out_of_service_count_each_node_of_a_rack() -> None:
    found = out_of_service(ALL, 6 * 3600.0)
    assert sum(n * p for n, p in enumerate(found)) == pytest.approx(6 / 4 + 2 * 6 / 30, rel=1e-6)
    assert found[1] / found[0] == pytest.approx(6 / 4)


def test_the_picked_number_of_spares_is_the_best_for_a_node() -> None:
    slow = costs(repair_s=72 * 3600.0)
    picked = best_policy(job(), slow, ALL)

    def worth(spares: int) -> float:
        found = expected_shares(job(), replace(picked, spare_nodes=spares), slow, ALL)
        return found.training / (64 + spares)

    assert picked.spare_nodes == max(range(80), key=worth) > 10
    assert best_policy(job(), costs(repair_s=60.0), ALL).spare_nodes == 0


def test_fewer_ranks_take_the_microbatches_of_those_that_are_missing() -> None:
    found = job()  # 16 groups of 4 nodes, 8 microbatches each
    assert [found.level(nodes) for nodes in (-3, 0, 1, 4, 5, 64, 99)] == [0, 0, 1, 1, 2, 16, 16]
    assert [found.speed(level) for level in (0, 1, 2, 8, 16)] == [1.0, 8 / 9, 8 / 10, 0.5, 0.0]


def test_waiting_for_repairs_costs_more_than_fewer_ranks() -> None:
    policy = replace(DISK, spare_nodes=0)
    fewer = expected_shares(job(), policy, costs(), ALL)
    waiting = expected_shares(job(), replace(policy, replans=False), costs(), ALL)
    assert waiting.degraded == pytest.approx(0, abs=1e-12)
    assert waiting.replanning == 0
    assert waiting.waiting > 0.8 > fewer.degraded > 0
    assert fewer.training > 4 * waiting.training


def test_one_gpu_has_no_partner_and_waits_for_its_node() -> None:
    alone = job(num_gpus=1, data_parallel_size=1)
    found = predicted_goodput(alone, make_cluster("h100-sxm", 1))
    assert found.replicate_every_steps is None
    assert found.shares.degraded == 0
    assert found.goodput + found.shares.waiting > 0.99


def test_a_cluster_that_never_fails_loses_nothing_but_a_save_a_day() -> None:
    never = ", ".join(f"{kind}_hours: .inf" for kind in ("process", "gpu", "node", "network"))
    cluster = cluster_from_yaml(f"{{gpu: h100-sxm, num_gpus: 512, failures: {{{never}, save_s: 0}}}}")
    found = predicted_goodput(job(), cluster)
    assert found.failures_per_day == found.spare_nodes == 0
    assert found.goodput == pytest.approx(1, abs=1e-5)
    assert found.effective_tokens_per_day == pytest.approx(86_400 / 5 * 4e6, rel=1e-5)


def test_costs_come_from_bytes_and_the_links_of_the_cluster() -> None:
    cluster = cluster_from_yaml("{gpu: h100-sxm, num_gpus: 512, storage_gb_s: 100}")
    found = ProtectionCosts.of(job(), cluster)
    assert found.write_s == pytest.approx(10)
    assert found.read_s == pytest.approx(51.2)
    assert found.checkpoint_stall_s == pytest.approx(6.3 + 10e9 / (63e9 * 0.79))
    assert found.copy_s == pytest.approx(10e9 / (50e9 * 0.9))


def test_a_cluster_file_says_each_figure() -> None:
    cluster = cluster_from_yaml(
        """
        gpu: h100-sxm
        num_gpus: 512
        storage_gb_s: 40
        spares: 3
        failures: {process_hours: 1e5, gpu_hours: 2e5, node_hours: 3e5, network_hours: 4e5, repair_hours: 5,
                   detect_s: 6, restart_s: 7, save_s: 8, replan_s: 9}
        """
    )
    known = cluster.reliability
    assert {kind.name: kind.mean_hours for kind in known.kinds} == {
        "process": 1e5, "gpu": 2e5, "host": 3e5, "network": 4e5,
    }  # fmt: skip
    seconds = known.detection_s, known.restart_s, known.save_s, known.replan_s
    assert (known.repair_hours, *seconds) == (5, 6, 7, 8, 9)
    assert (cluster.storage_bandwidth, cluster.spare_nodes) == (40e9, 3)
    assert predicted_goodput(job(), cluster).spare_nodes == 3


def test_without_figures_a_cluster_has_those_that_were_observed() -> None:
    cluster = make_cluster("h100-sxm", 16_384)
    assert cluster.reliability == OBSERVED
    assert cluster.storage_bandwidth == pytest.approx(2e12)
    rates = [found.rate_per_s * 54 * 86_400 for found in hazards_of(job(num_gpus=16_384), cluster)]
    assert rates == pytest.approx([63, 268, 53, 35])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("failures: {gpu_hours: 0}", "failures.gpu_hours: Input should be greater than 0"),
        ("failures: {mtbf: 9}", "failures.mtbf: Extra inputs are not permitted"),
        ("failures: {restart_s: -1}", "failures.restart_s: Input should be greater than or equal to 0"),
        ("storage_gb_s: 0", "storage_gb_s: Input should be greater than 0"),
        ("spares: -2", "spares: Input should be greater than or equal to 0"),
        ("spares: 1.5", "spares: Input should be a valid integer"),
    ],
)
def test_a_bad_figure_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidCluster) as found:
        cluster_from_yaml(f"gpu: h100-sxm\nnum_gpus: 8\n{text}\n", source="cluster.yaml")
    assert said in str(found.value)
