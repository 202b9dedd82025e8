"""Plans whose blocks have some of what they keep in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.host_copies import added_by_copies
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.known import AUTOPAR, COMPILED
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.kept_lists import INPUTS
from autopar.ir.plan import Plan
from autopar.search.api import predict_plan, priced_plan, search_captured
from autopar.search.outer.kept_sets import kept_sets
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.problem.kept_sets import level_names
from autopar.search.result import SearchResult
from tests.search.test_kept_sets import PINNED, model, tight


def with_stack(cluster: Cluster, stack: Stack) -> Cluster:
    return replace(cluster, device=replace(cluster.device, stack=stack))


def found(cluster: Cluster) -> SearchResult:
    return search_captured(model(), cluster, PINNED)


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_host_memory_is_faster_than_computing_again(share: float) -> None:
    cluster = tight(share)
    own, others = found(cluster), found(with_stack(cluster, replace(AUTOPAR, name="device", keeps_on_host=False)))
    assert own.plan.uses_host and not others.plan.uses_host
    assert own.predicted.step_time_s < others.predicted.step_time_s
    assert own.predicted.peak_bytes <= cluster.device.usable_bytes
    assert own.predicted.breakdown_s["copies_to_host"] > 0
    assert sum(own.predicted.breakdown_s.values()) == pytest.approx(own.predicted.step_time_s)
    prediction = own.plan.prediction
    assert prediction is not None
    assert prediction.stage_host_bytes == [int(own.predicted.host_bytes[0])]
    assert all(name.endswith("-host") for block in own.plan.blocks for name in block.host or {})
    again = predict_plan(model(), cluster, Plan.from_yaml(own.plan.to_yaml()))
    assert again.step_time_s == pytest.approx(own.predicted.step_time_s)
    assert again.host_bytes == own.predicted.host_bytes


def test_a_plan_with_room_does_without() -> None:
    assert not found(make_cluster("h100-sxm", 8)).plan.uses_host


def test_host_memory_has_an_end() -> None:
    cluster = tight(0.4)
    needed = found(cluster).predicted.host_bytes[0]
    for share, used in ((1.01, True), (0.5, False)):
        host = replace(cluster.device.host, memory_bytes=share * needed)
        less = found(replace(cluster, device=replace(cluster.device, host=host)))
        assert less.plan.uses_host is used
        assert less.predicted.peak_bytes <= cluster.device.usable_bytes


def test_stacks_and_devices_without() -> None:
    assert not found(with_stack(tight(0.4), COMPILED)).plan.uses_host
    full = search_captured(model(), make_cluster("h100-sxm", 8), replace(PINNED, remat="full")).plan
    for cluster in (make_cluster("h100-sxm", 8), make_cluster("cpu", 8, 8)):
        pricing, assignment, _ = priced_plan(model(), cluster, full)
        sets = kept_sets(pricing, assignment)
        assert any(map(any, (own.host for own in sets))) is not cluster.device.is_cpu
        for own in sets:
            for listed, host in zip(own.listed, own.host, strict=True):
                assert set(host) <= {INPUTS, *(listed or ())}


def test_prices_of_a_plan_edited_by_hand() -> None:
    cluster = make_cluster("h100-sxm", 8)
    plan = search_captured(model(), cluster, replace(PINNED, remat=0.4)).plan
    name = "keep40"
    blocks = [
        block.model_copy(update={"host": {name: [*block.kept[name], INPUTS]} if name in block.kept else None})
        for block in plan.blocks
    ]
    edited = Plan.from_yaml(plan.model_copy(update={"blocks": blocks}).to_yaml())
    one, other = (predict_plan(model(), cluster, each) for each in (plan, edited))
    pricing, assignment, stages = priced_plan(model(), cluster, edited)
    level = level_names(pricing.kept).index(name)
    prices = evaluate_stages(pricing, assignment, stages).blocks
    sent = sum(price.host[level].num_bytes for price in prices)
    assert other.host_bytes == (sent,)
    # What is on its way after a forward is that of the last block that sends anything.
    last = next(price.host[level].num_bytes for price in reversed(prices) if price.host[level].num_bytes)
    assert one.kept_bytes[0] - other.kept_bytes[0] == pytest.approx(sent - last)
    added = [
        added_by_copies(price.host[level].num_bytes, cluster.device, price.computed(price.recomputed[level])).total_s
        for price in prices
    ]
    assert other.step_time_s - one.step_time_s == pytest.approx(sum(added), rel=1e-6)
    assert all(price.host[0].added == OpTime() for price in prices)


def test_offloaded_parameters_leave_less_of_the_link() -> None:
    cluster = make_cluster("h100-sxm", 8)
    plan = search_captured(model(), cluster, replace(PINNED, remat=0.4)).plan
    blocks = [
        block.model_copy(update={"host": {name: [*kept, INPUTS] for name, kept in block.kept.items()} or None})
        for block in plan.blocks
    ]
    moved = plan.model_copy(update={"blocks": blocks})
    added = {}
    for offload in (False, True):
        stages = [stage.model_copy(update={"offload": offload}) for stage in moved.stages]
        pricing, assignment, own = priced_plan(model(), cluster, moved.model_copy(update={"stages": stages}))
        prices = evaluate_stages(pricing, assignment, own).blocks
        added[offload] = sum(copies.added.total_s for price in prices for copies in price.host)
    assert added[True] > added[False] > 0


def test_larger_microbatches_fit_with_host_memory() -> None:
    """With levels alone two microbatches fit, where one does with activations in host memory."""
    cluster, free = tight(-0.07), replace(PINNED, num_microbatches=None, zero=3)
    own = search_captured(model(), cluster, free)
    two = search_captured(model(), cluster, replace(free, num_microbatches=2))
    assert (own.plan.batch.num_microbatches, own.plan.uses_host) == (1, True)
    assert own.predicted.step_time_s < 0.95 * two.predicted.step_time_s
    assert own.predicted.peak_bytes <= cluster.device.usable_bytes
    again = predict_plan(model(), cluster, Plan.from_yaml(own.plan.to_yaml()))
    assert again.step_time_s == pytest.approx(own.predicted.step_time_s)
