"""Experts over tensor and context ranks: what ``ep`` means, and that the search finds them where they are best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.passes.normalise import normalise
from autopar.report.words import experts_words
from autopar.search.api import estimate_captured, search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.spread_experts import spread_experts
from autopar.search.problem.workload import Workload


def resolved(num_gpus: int, **given: Any) -> tuple[int | None, int | None, tuple[str, ...]]:
    found = spread_experts(Constraints(**given), num_gpus)
    return found.dp, found.ep, found.experts_within


@pytest.mark.parametrize(
    ("num_gpus", "given", "dp", "ep", "within"),
    [
        (16, {"tp": 2, "ep": 8}, None, 8, ()),
        (8, {"tp": 2, "ep": 8}, None, 4, ("tp",)),
        (8, {"dp": 2, "tp": 2, "ep": 4}, 2, 2, ("tp",)),
        (8, {"dp": 4, "tp": 2, "ep": 8}, 1, 4, ("tp",)),
        (8, {"dp": 8, "ep": 8}, 1, 8, ()),
        (8, {"cp": 2, "ep": 8}, None, 4, ("cp",)),
        (8, {"tp": 2, "cp": 2, "ep": 4}, None, 2, ("tp",)),
        (8, {"tp": 2, "cp": 2, "ep": 8}, None, 2, ("tp", "cp")),
        (8, {"tp": 8, "ep": 8}, None, 1, ("tp",)),
        (16, {"pp": 2, "tp": 2, "ep": 8}, None, 4, ("tp",)),
        (8, {"dp": 1, "tp": 8, "cp": 1, "ep": 1, "pp": 1}, 1, 1, ()),
    ],
)
def test_over_how_many_ranks_of_which_axes(
    num_gpus: int, given: dict[str, int], dp: int | None, ep: int, within: tuple[str, ...]
) -> None:
    assert resolved(num_gpus, **given) == (dp, ep, within)


@pytest.mark.parametrize(
    ("num_gpus", "given", "words"),
    [
        (
            8,
            {"tp": 2, "ep": 16},
            r"ep=16: no experts can be spread over 16 of 8 ranks with tp=2(.|\n)*--ep 2 or 4 or 8",
        ),
        (16, {"dp": 4, "tp": 4, "ep": 6}, r"ep=6: .* with dp=4, tp=4(.|\n)*--ep 2 or 4"),
    ],
)
def test_what_cannot_be_says_what_can(num_gpus: int, given: dict[str, int], words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        resolved(num_gpus, **given)


def mixtral(*, batch: int, seq: int, layers: int = 4) -> CapturedModel:
    config = transformers.MixtralConfig(num_hidden_layers=layers, max_position_embeddings=seq, use_cache=False)
    with torch.device("meta"):
        model, tokens = transformers.MixtralForCausalLM(config), torch.zeros((batch, seq), dtype=torch.long)
    return normalise(capture(model, {"input_ids": tokens, "labels": tokens}), check=False)


@pytest.fixture(scope="module")
def long() -> CapturedModel:
    return mixtral(batch=8, seq=32768)


def test_the_search_spreads_experts_over_context_ranks_where_that_is_best(long: CapturedModel) -> None:
    """Not all of them for data: faster than any plan whose experts have an axis of their own."""
    cluster, workload = make_cluster("h100-sxm", 32), Workload.of(long, "bf16")
    free = search_captured(long, cluster, Constraints(precision="bf16"), workload=workload)
    assert "cp" in experts_words(free.plan)
    times = []
    for cp, ep in ((1, 8), (2, 8), (4, 8), (4, 1), (8, 1)):
        pinned = Constraints(cp=cp, ep=ep, precision="bf16")
        try:
            times.append(search_captured(long, cluster, pinned, workload=workload).predicted.step_time_s)
        except InfeasiblePlan:
            continue
    assert times and free.predicted.step_time_s < 0.99 * min(times)


@pytest.mark.parametrize(("given", "words"), [({"tp": 2, "ep": 8}, "ep × tp"), ({"cp": 2, "ep": 8}, "cp × ep")])
def test_more_expert_ranks_than_data_ranks(long: CapturedModel, given: dict[str, int], words: str) -> None:
    """Experts are on each axis, and their state is divided over all of them; that of the rest over what ZeRO has."""
    found = estimate_captured(long, make_cluster("h100-sxm", 8), Constraints(**given, zero=1, precision="bf16"))
    plan = found.plan
    assert experts_words(plan).startswith(f"experts over {words} (8 ranks")
    placed = place_captured(long, plan)
    held = 0.0
    for name, storage in placed.storage.items():
        axes = {axis for axis, placement in enumerate(storage.layout) if not placement.is_replicate()}
        axes |= set(storage.zero_axes) & set(placed.shard_axes)
        size: float = torch.Size(placed.captured.parameters[name].shape).numel()
        for axis in axes:
            size /= placed.mesh.sizes[axis]
        held += 8 * size
    assert found.predicted.memory[0].optimizer == pytest.approx(held, rel=1e-6)


def test_a_capacity_keeps_experts_off_context_ranks(long: CapturedModel) -> None:
    with pytest.raises(InfeasiblePlan, match=r"cannot be spread over mesh axis 'cp'(.|\n)*--expert-capacity"):
        given = Constraints(cp=2, ep=8, expert_capacity=1.25, precision="bf16")
        estimate_captured(long, make_cluster("h100-sxm", 8), given)


def test_spread_over_an_axis_that_is_not_there() -> None:
    with pytest.raises(InfeasiblePlan, match="experts_within names 'tp'"):
        Constraints(experts_within=("tp",), dp=2).check(4, 8)
