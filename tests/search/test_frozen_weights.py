"""Frozen weights in FLOPs, memory and time: what is not computed, kept or sent is not counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload

ROWS, WIDTH, DEPTH = 64, 256, 4
PRODUCT = 2.0 * ROWS * WIDTH * WIDTH


class Stack(nn.Module):
    """Equal layers, whose products are all of their FLOPs but for the activations'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.relu(layer(x))
        return {"loss": x.square().mean(), "pooled": self.pooler(x)}


def captured(trains: Callable[[str], bool]) -> CapturedModel:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    return normalise(capture(model, torch.randn(ROWS, WIDTH)))


@pytest.mark.parametrize(
    "trains,products",
    [
        # Of a trained layer forward and both gradients, but for the input of the first. No loss reads the pooler.
        (lambda name: True, 3 * DEPTH - 1),
        (lambda name: name.startswith("layers.0"), 2 * DEPTH),
        (lambda name: name.startswith("layers.3"), DEPTH + 1),
        (lambda name: name.startswith("layers.2"), DEPTH + 2),
        (lambda name: not name.startswith("layers.1"), 3 * DEPTH - 2),
        (lambda name: name.endswith("bias"), 2 * DEPTH - 1),
    ],
    ids=["all", "first", "last", "third", "all but the second", "biases"],
)
def test_flops_are_those_of_what_is_computed(trains: Callable[[str], bool], products: int) -> None:
    assert Workload.of(captured(trains), "fp32").model_flops == pytest.approx(products * PRODUCT, rel=0.03)


def test_frozen_attention_has_gradients_of_what_is_read_alone() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.randn(2, 4, 64, 16)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x * self.q, x * self.k, x * self.v).square().mean()

    flops = {}
    for trained in ("qkv", "qk", "q", "v"):
        model = Attends()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        workload = Workload.of(normalise(capture(model, torch.randn(2, 4, 64, 16))), "fp32")
        flops[trained] = workload.model_flops / workload.forward_flops
    assert flops == pytest.approx({"qkv": 3.0, "qk": 2.5, "q": 2.0, "v": 1.5}, rel=0.02)


CLUSTER = make_cluster("h100-sxm", 8)


def memory_of(model: CapturedModel, zero: int) -> dict[str, int]:
    plan = search_captured(model, CLUSTER, Constraints(dp=8, zero=zero, precision="fp32")).plan
    assert plan.prediction is not None
    return plan.prediction.memory_parts_bytes[0]


def test_frozen_weights_have_no_optimiser_state_and_are_sharded_at_level_3_alone() -> None:
    model = captured(lambda name: name.startswith("layers.3"))
    layer, all_of_them = 4 * (WIDTH * WIDTH + WIDTH), 4 * (DEPTH + 1) * (WIDTH * WIDTH + WIDTH)
    memory = {zero: memory_of(model, zero) for zero in (0, 2, 3)}
    assert memory[0]["optimizer"] == 2 * layer and memory[0]["parameters"] == all_of_them
    assert memory[2]["optimizer"] == 2 * layer / 8
    assert memory[2]["parameters"] >= all_of_them - layer
    assert memory[3]["parameters"] < all_of_them / 4


def test_parameters_without_a_gradient_are_priced_as_frozen() -> None:
    workload = Workload.of(captured(lambda name: name.startswith(("layers.3", "pooler"))), "fp32")
    trained = {
        workload.captured.parameters[name].name for g in workload.parameters if g.requires_grad for name in g.names
    }
    assert trained == {"layers.3.weight", "layers.3.bias"}
    assert workload.trainable_numel == WIDTH * WIDTH + WIDTH


def test_frozen_weights_of_a_narrow_model_take_what_they_are_stored_in() -> None:
    """No float32 master of them, and no copy where they are computed with as they are."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 1, bias=False, dtype=torch.bfloat16))
    model[0].to(torch.bfloat16).requires_grad_(False)
    batch = torch.zeros(8, 256, dtype=torch.bfloat16)
    for precision in ("fp32", "bf16"):
        target = {"loss_fn": lambda out, _: out.mean(), "example_target": batch}
        plan = autopar.search(model, 1, example_inputs=(batch,), precision=precision, **target)
        assert plan.prediction is not None
        assert plan.prediction.memory_parts_bytes[0]["parameters"] < 2 * 256 * 256 + 6 * 257
