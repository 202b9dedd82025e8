"""Published runs of ZeRO-3 until 2021 are taken to gather each parameter by itself, in place, nanotron's of ZeRO-1 to
reduce gradients after the backward, in pieces, and Zero Bubble's not to wait at the end of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model.communication.collectives import Fabric
from autopar.ir.capture.capture import capture
from autopar.ir.redistribution import Collective
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from benchmarks.published_predictions import roomy_cluster
from benchmarks.published_software import (
    gathers_in_place,
    in_pieces_s,
    in_place_s,
    reduces_in_pieces,
    step_time_s,
    validates_later,
)
from tests.search.test_search import captured as chain_of_layers
from tests.test_published_rows import row

SC21 = {
    "source": "Narayanan et al. SC21", "gpu": "A100-80GB", "n_gpus": "16", "dp": "16", "zero_stage_or_fsdp": "zero3",
    "precision": "fp16", "recompute": "full", "micro_batch": "2", "global_batch": "64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "in_place"),
    [
        ({}, True),
        ({"source": "a page of 2021"}, True),
        ({"source": "a page of 2022"}, False),
        ({"source": "a page"}, False),
        ({"zero_stage_or_fsdp": "fsdp"}, False),
        ({"zero_stage_or_fsdp": "zero1"}, False),
        ({"tp": "2", "dp": "8"}, False),
    ],
)
def test_it_is_told_by_kind_and_year(cells: dict[str, str], in_place: bool) -> None:
    assert gathers_in_place(row(**{**SC21, **cells})) is in_place


class Tied(nn.Module):
    """Matrices of 160,000 and 320,000 elements, the second used twice, and a bias that is never taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(400, 400)
        self.second = nn.Parameter(torch.empty(400, 800))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ self.second @ self.second.T).square().mean()


@pytest.mark.parametrize(("recompute", "passes"), [("full", 3), ("none", 2)])
def test_what_it_takes(recompute: str, passes: int) -> None:
    given = row(**{**SC21, "recompute": recompute})
    with torch.device("meta"):
        captured = normalise(capture(Tied(), (torch.zeros(64, 400),)))
    cluster = roomy_cluster(given)
    found = estimate_captured(captured, cluster, given.constraints())
    fabric, axes = Fabric(cluster, found.plan.stage_mesh), tuple(range(len(found.plan.stage_mesh)))
    expected = 0.0
    for numel in (160_000, 320_000):
        gather_s = fabric.time(Collective.ALL_GATHER, 2 * numel, axes) + 16 * cluster.device.kernel_launch_s
        expected += passes * gather_s + fabric.time(Collective.ALL_REDUCE, 2 * numel, axes)
    assert found.plan.batch.num_microbatches == 2
    in_place = in_place_s(given, captured, found.plan)
    assert in_place == pytest.approx(2 * expected)
    today = found.predicted.breakdown_s["gradient_sync"]
    assert step_time_s(given, captured, found.plan, found.predicted) == pytest.approx(
        found.predicted.step_time_s - today + in_place
    )


def test_later_software_is_todays() -> None:
    given = row(**{**SC21, "source": "a page of 2024"})
    with torch.device("meta"):
        captured = normalise(capture(Tied(), (torch.zeros(64, 400),)))
    found = estimate_captured(captured, roomy_cluster(given), given.constraints())
    assert step_time_s(given, captured, found.plan, found.predicted) == found.predicted.step_time_s


NANOTRON = {
    "source": "huggingface/nanotron", "gpu": "h100-sxm", "n_gpus": "16", "dp": "16", "zero_stage_or_fsdp": "zero1",
    "precision": "bf16", "layers": "4", "micro_batch": "2", "global_batch": "64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "in_pieces"),
    [
        ({}, True),
        ({"zero_stage_or_fsdp": "ddp"}, False),
        ({"source": "a page"}, False),
        ({"tp": "2", "dp": "8"}, True),
        ({"tp": "16", "dp": "1"}, False),
    ],
)
def test_pieces_are_those_of_one_program_and_stage(cells: dict[str, str], in_pieces: bool) -> None:
    assert reduces_in_pieces(row(**{**NANOTRON, **cells})) is in_pieces


def test_nothing_runs_beside_what_pieces_wait_for() -> None:
    given = row(**NANOTRON)
    with torch.device("meta"):
        captured = normalise(capture(Tied(), (torch.zeros(64, 400),)))
    cluster = roomy_cluster(given)
    found = estimate_captured(captured, cluster, given.constraints())
    fabric = Fabric(cluster, found.plan.stage_mesh)
    numel = 160_000 + 320_000 + 400
    expected = fabric.time(Collective.REDUCE_SCATTER, 4 * numel, (0,)) + fabric.time(
        Collective.ALL_GATHER, 2 * numel, (0,)
    )
    expected += cluster.device.memory_seconds(28 * numel) + 6 * 4 * 16 * 9.2e-6
    assert in_pieces_s(given, captured, found.plan) == pytest.approx(expected)
    today = found.predicted.breakdown_s["gradient_sync"]
    assert step_time_s(given, captured, found.plan, found.predicted) == pytest.approx(
        found.predicted.step_time_s - today + expected
    )


ZERO_BUBBLE = {
    "source": "Zero Bubble PP (tables 3 and 4)", "gpu": "A100-80GB", "n_gpus": "2", "pp": "2", "dp": "1", "vpp": "1",
    "zero_stage_or_fsdp": "none", "precision": "fp16", "schedule": "ZB-2p",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "later"),
    [({}, True), ({"schedule": "ZB-V"}, True), ({"schedule": "1F1B"}, False), ({"source": "a page"}, False)],
)
def test_zero_bubbles_authors_validate_an_update_in_the_next_step(cells: dict[str, str], later: bool) -> None:
    given = row(**{**ZERO_BUBBLE, **cells})
    assert validates_later(given) is later
    constraints = Constraints(pp=2, num_microbatches=8, schedule="zb-2p", precision="bf16")
    model = chain_of_layers(256)
    found = estimate_captured(model, roomy_cluster(given), constraints)
    expected = found.predicted.period_s if later else found.predicted.step_time_s
    assert step_time_s(given, model, found.plan, found.predicted) == expected
    assert found.predicted.period_s < 0.99 * found.predicted.step_time_s
