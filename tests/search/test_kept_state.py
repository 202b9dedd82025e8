"""Bytes of state that a plan's ranks keep from step to step, which checkpoints and copies on other hosts hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.predict.kept_state import model_state_bytes
from autopar.search.problem.constraints import Constraints

WIDTH, ROWS = 256, 64
NUMEL = 2 * WIDTH * WIDTH


def captured(*, trains_first: bool = True) -> CapturedModel:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    model[0].requires_grad_(trains_first)
    return normalise(
        capture(model, torch.randn(ROWS, WIDTH), loss_fn=nn.MSELoss(), example_target=torch.randn(ROWS, WIDTH))
    )


@pytest.mark.parametrize(
    ("pins", "ranks_sharing"),
    [
        ({"dp": 8, "zero": 0}, 1),
        ({"dp": 8, "zero": 1}, 8),
        ({"dp": 8, "zero": 3}, 8),
        ({"dp": 8, "zero": 3, "offload": True}, 8),
        ({"dp": 4, "tp": 2, "zero": 0}, 2),
        ({"dp": 4, "pp": 2, "zero": 1}, 8),
    ],
    ids=str,
)
def test_a_rank_keeps_its_share_of_parameters_and_optimiser_state(pins: dict, ranks_sharing: int) -> None:
    found = estimate_captured(captured(), make_cluster("h100-sxm", 8), Constraints(precision="bf16", **pins))
    assert found.predicted.state() == 12 * NUMEL / ranks_sharing
    assert model_state_bytes(found.workload) == 12 * NUMEL


def test_a_frozen_parameter_has_no_optimiser_state() -> None:
    found = estimate_captured(
        captured(trains_first=False), make_cluster("h100-sxm", 2), Constraints(precision="bf16", dp=2, zero=0)
    )
    assert model_state_bytes(found.workload) == found.predicted.state() == (12 + 4) * NUMEL / 2
