"""The search chooses the schedule; pins and predictions of all of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.ir.schedule import Schedule, splits_backward
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import estimate_captured, predict_plan, prices_of, search_captured
from autopar.search.outer.configuration import Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.found_order import with_found_order
from autopar.search.outer.other_schedules import best_schedule
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints, even_virtual_stages
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult
from tests.search.test_search import Model, captured

SCHEDULES: list[tuple[Schedule, int]] = [
    ("naive", 1), ("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h1", 2), ("zb-2p", 1), ("interleaved", 2), ("zb-v", 2),
    ("dualpipe-v", 2), ("found", 1), ("found", 2),
]  # fmt: skip
PIPELINE = Constraints(pp=2, num_microbatches=4)


@pytest.fixture(scope="module")
def tied() -> CapturedModel:
    with torch.device("meta"):
        tokens = torch.zeros(16, 64, dtype=torch.long)
        return normalise(capture(Model(1024, tied=True), (tokens, tokens)))


@pytest.fixture(scope="module")
def workload(tied: CapturedModel) -> Workload:
    return Workload.of(tied, "fp32")


def test_the_search_finds_the_fastest_schedule(tied: CapturedModel, workload: Workload) -> None:
    cluster = make_cluster("a100-80gb", 2, 2)
    pinned = {}
    for schedule, virtual in SCHEDULES:
        limits = replace(PIPELINE, schedule=schedule, virtual_stages=virtual)
        found = search_captured(tied, cluster, limits, workload=workload)
        plan = found.plan
        assert (plan.schedule, plan.virtual_stages, plan.num_ranks) == (schedule, virtual, 2)
        assert Plan.from_yaml(plan.to_yaml()) == plan
        again = predict_plan(tied, cluster, plan, workload=workload)
        assert again.step_time_s == pytest.approx(found.predicted.step_time_s)
        assert again.memory == found.predicted.memory and len(again.memory) == 2
        assert len(partition(place_captured(tied, plan))) == 2 * virtual
        pinned[schedule, virtual] = found.predicted
    best = search_captured(tied, cluster, PIPELINE, workload=workload)
    least = min(predicted.step_time_s for predicted in pinned.values())
    assert best.predicted.step_time_s == pytest.approx(least, rel=0.005)
    assert best.predicted.step_time_s * (1 - best.optimality_gap) <= least
    assert pinned["zb-h1", 1].step_time_s < pinned["1f1b", 1].step_time_s < pinned["naive", 1].step_time_s
    assert pinned["gpipe", 1].peak_bytes > pinned["1f1b", 1].peak_bytes


def test_a_schedule_that_splits_the_backward_is_found_with_rematerialisation_too() -> None:
    """Where it would not fit without rematerialisation; the best plans alone are cut for that."""
    model = captured(1024, 8, batch=32)
    workload, cluster = Workload.of(model, "fp32"), make_cluster("a100-80gb", 2, 2)
    names: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")

    def found(room: float | None, **pinned: Any) -> SearchResult:
        own = cluster
        if room is not None:
            device = replace(cluster.device, memory_bytes=int(room) + cluster.device.reserved_bytes)
            own = replace(cluster, device=device)
        return search_captured(model, own, replace(PIPELINE, num_microbatches=8, **pinned), workload=workload)

    most = found(None, schedule="zb-v", remat="none").predicted.peak_bytes
    least = found(None, schedule="zb-v", remat="full").predicted.peak_bytes
    split = 0
    for share in (0.2, 0.5, 0.8):
        room = least + share * (most - least)
        best = found(room)
        for name in names:
            with suppress(InfeasiblePlan):  # it needs more memory than others
                assert best.predicted.step_time_s <= 1.005 * found(room, schedule=name).predicted.step_time_s
        split += splits_backward(best.plan.schedule) and any(stage.remat for stage in best.plan.stages)
    assert split


def test_a_plan_with_an_order_of_its_own_may_be_faster_under_a_schedule_with_a_name(
    tied: CapturedModel, workload: Workload
) -> None:
    """As when its blocks keep other tensors than those that the order was found for."""
    cluster = make_cluster("a100-80gb", 2, 2)
    plain = search_captured(tied, cluster, replace(PIPELINE, schedule="1f1b"), workload=workload).candidates[0]
    free = replace(plain, configuration=replace(plain.configuration, constraints=PIPELINE))
    prices = prices_of(workload, cluster, PIPELINE)
    solver = Solver(prices=prices, budget_bytes=cluster.device.usable_bytes, levels=PIPELINE.levels)
    ordered = with_found_order(solver, free)
    assert ordered.configuration.passes is not None
    named = best_schedule(solver, ordered.configuration, Inner.of(ordered), None)
    assert named is not None
    assert named.configuration.schedule != "found"
    assert named.configuration.passes is None


def test_a_free_search_keeps_to_the_schedules_of_the_stack(tied: CapturedModel, workload: Workload) -> None:
    cluster = make_cluster("a100-80gb", 2, 2)
    assert splits_backward(search_captured(tied, cluster, PIPELINE, workload=workload).plan.schedule)
    cluster = make_cluster("a100-80gb", 2, 2, stack=find_stack("megatron-core-2025"))
    assert search_captured(tied, cluster, PIPELINE, workload=workload).plan.schedule in ("1f1b", "interleaved")
    pinned = search_captured(tied, cluster, replace(PIPELINE, schedule="zb-v"), workload=workload)
    assert pinned.plan.schedule == "zb-v"


def test_more_microbatches_in_flight_hide_slow_sends_where_memory_allows() -> None:
    """Four blocks, so a stage a rank; a microbatch is sent in as long as a stage computes."""
    model = captured(1024, 2, batch=32)
    workload, cluster = Workload.of(model, "fp32"), make_cluster("a100-80gb", 4, 1)
    cluster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=2e9, alone=None))
    limits = Constraints(pp=4, num_microbatches=8)

    def found(limits: Constraints, room: float) -> tuple[str, Predicted]:
        device = replace(cluster.device, memory_bytes=int(room) + cluster.device.reserved_bytes)
        result = search_captured(model, replace(cluster, device=device), limits, workload=workload)
        return result.plan.schedule, result.predicted

    names: tuple[Schedule, ...] = ("1f1b", "zb-h1", "zb-2p")
    pinned = [found(replace(limits, schedule=name), 1e12)[1] for name in names]
    peaks = [predicted.peak_bytes for predicted in pinned]
    assert peaks == sorted(peaks) and pinned[2].step_time_s < 0.9 * pinned[1].step_time_s
    # An order that is found for the plan is better than either, and fills what memory there is.
    for room, named in ((1e12, pinned[2]), (0.95 * peaks[2], pinned[1])):
        schedule, predicted = found(limits, room)
        assert schedule == "found"
        assert predicted.step_time_s < named.step_time_s
        assert predicted.peak_bytes <= room


def test_steps_of_zb_2p_would_follow_each_other_without_a_bubble(tied: CapturedModel, workload: Workload) -> None:
    """The end of a step, where ranks wait for the last one, is in its seconds and not in its period."""
    cluster = make_cluster("a100-80gb", 2, 2)
    for schedule, virtual in SCHEDULES:
        limits = replace(PIPELINE, schedule=schedule, virtual_stages=virtual)
        predicted = estimate_captured(tied, cluster, limits, workload=workload).predicted
        waits = predicted.step_time_s - predicted.period_s
        assert waits >= -1e-9
        if schedule == "zb-2p":
            assert waits == pytest.approx(predicted.forward_s[0], rel=0.5)


def test_virtual_stages_that_are_considered() -> None:
    """Those whose stages are most even, as long as each has a block."""
    limits = Constraints(schedule="interleaved")
    assert [shape.virtual_stages for shape in limits.shapes(16, 16, (1, 126, 1))] == [2, 3, 4, 8]
    assert [shape.virtual_stages for shape in limits.shapes(16, 16, (1, 98, 1))] == [2, 3, 4]
    assert [shape.virtual_stages for shape in limits.shapes(8, 16, (1, 96, 1))] == [2, 3, 4, 5, 6, 7, 12]
    assert even_virtual_stages((1, 4, 1), 8) == (1,)


def test_a_single_microbatch_is_not_tried_under_schedules_with_the_same_passes() -> None:
    def names(count: int) -> list[str]:
        return [shape.schedule for shape in Constraints(virtual_stages=1).shapes(4, count, (1, 8, 1))]

    assert names(1) == ["1f1b", "zb-h1"]
    assert names(2) == ["1f1b", "zb-h1", "zb-2p", "naive"]


@pytest.mark.parametrize(
    ("layers", "ranks", "virtual"),
    [
        (16, 2, 8), (21, 3, 7), (22, 8, 3), (30, 8, 4), (40, 4, 10), (46, 16, 3), (48, 2, 24), (56, 8, 7), (60, 4, 3),
        (61, 4, 4), (62, 32, 2), (64, 8, 8), (80, 4, 5), (80, 4, 20), (94, 4, 12), (94, 8, 3), (96, 8, 12), (96, 16, 2),
        (105, 35, 3), (126, 8, 8), (126, 9, 7), (126, 16, 4),
    ],
)  # fmt: skip
def test_virtual_stages_of_published_runs_are_considered(layers: int, ranks: int, virtual: int) -> None:
    """Decoders, which have an embedding and a head beside their layers."""
    assert virtual in even_virtual_stages((1, layers, 1), ranks)


def test_zero_leaves_whole_what_two_stages_of_a_rank_share(tied: CapturedModel, workload: Workload) -> None:
    """The embedding is also the head: under a v placement both are on rank 0."""
    cluster = make_cluster("a100-80gb", 8, 8)
    limits = replace(PIPELINE, dp=4, tp=1, num_microbatches=4, zero=1)
    sizes = {}
    for schedule, virtual in (("zb-h1", 2), ("zb-v", 2)):
        pinned = replace(limits, schedule=schedule, virtual_stages=virtual)
        sizes[schedule] = search_captured(tied, cluster, pinned, workload=workload).predicted.memory[0]
    # One whole copy of 128 x 1024 float32 moments, where there would be a quarter.
    assert sizes["zb-v"].optimizer - sizes["zb-h1"].optimizer > 0


def test_stages_that_share_a_parameter_sum_its_gradient_last(tied: CapturedModel, workload: Workload) -> None:
    """Embedding and head on a slow network: the sum waits for both stages, in the closed form and stream by stream."""
    cluster = make_cluster("h100-sxm", 2, 1)
    slow = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=1e6, alone=None))
    size = 4 * next(p.numel for p in tied.parameters.values() if "embed" in p.name)
    found = estimate_captured(tied, slow, replace(PIPELINE, pp=2), workload=workload).predicted
    (holders,) = found.costs.shared_s
    assert holders == (0, 1)
    assert found.costs.shared_s[holders] == pytest.approx(size / slow.inter_node.ring_bandwidth(2), rel=0.01)
    before = max(events[-1].end_s for events in found.timeline.events)
    assert found.step_time_s > before + found.costs.shared_s[holders]
    last = [span for span in found.spans if span.name == "shared gradients"]
    assert len(last) == 2 and min(s.start_s for s in last) >= max(s.end_s for s in found.spans if "B" in s.name)


def test_an_estimate_is_of_1f1b(tied: CapturedModel, workload: Workload) -> None:
    cluster = make_cluster("a100-80gb", 2, 2)
    assert estimate_captured(tied, cluster, PIPELINE, workload=workload).plan.schedule == "1f1b"
    plan = estimate_captured(tied, cluster, replace(PIPELINE, virtual_stages=2), workload=workload).plan
    assert (plan.schedule, plan.virtual_stages) == ("interleaved", 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "zb-v", "virtual_stages": 3}, "schedule: zb-v has 2 virtual stages a rank, not 3"),
        ({"schedule": "zb-v", "pp": 1}, "2 virtual stages need a pipeline of 2 ranks"),
        ({"schedule": "dualpipe-v", "pp": 2, "num_microbatches": 2}, "needs 4 microbatches or more, not 2"),
        ({"virtual_stages": 2, "pp": 1}, "virtual_stages is 2, but there is no pipeline"),
        ({"virtual_stages": 0}, "virtual_stages is 0"),
    ],
)
def test_contradictions(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        Constraints(**given).check(4, 16)
