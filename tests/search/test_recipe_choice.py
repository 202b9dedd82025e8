"""Each product gets the recipe that is the fastest for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.stacks.known import MEGATRON_CORE_2025
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.recipe_pins import pins_of
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints

CLUSTER = make_cluster("h100-sxm", 1, stack=MEGATRON_CORE_2025)
GIVEN = Constraints(precision="bf16", remat="none", num_microbatches=1, recipes=(None, "fp8-row"))


class Layer(nn.Module):
    """Two wide products, and one that is too small for its casts to pay off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 16384, bias=False), nn.Linear(16384, 4096, bias=False)
        self.gate = nn.Linear(4096, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.gate(x.tanh()).sigmoid().mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 4096), nn.Linear(4096, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    with torch.device("meta"):
        return normalise(capture(Model(), (torch.empty(4, 2048, 64),)))


def test_a_choice_is_made_for_each_product(captured: CapturedModel) -> None:
    best = search_captured(captured, CLUSTER, GIVEN)
    (layers,) = (block for block in best.plan.blocks if block.repeats == 3)
    assert layers.recipes == {"up/linear": "fp8-row", "down/linear": "fp8-row"}
    alone = [search_captured(captured, CLUSTER, replace(GIVEN, recipes=(recipe,))) for recipe in GIVEN.recipes]
    assert best.predicted.step_time_s < min(own.predicted.step_time_s for own in alone)


def test_a_pinned_product_is_not_chosen_for(captured: CapturedModel) -> None:
    pinned = replace(GIVEN, recipe_pins=pins_of({"*.gate.weight": "fp8-row", "*.up.weight": "bf16"}))
    best = search_captured(captured, CLUSTER, pinned)
    (layers,) = (block for block in best.plan.blocks if block.repeats == 3)
    assert layers.recipes == {"down/linear": "fp8-row", "gate/linear": "fp8-row"}
