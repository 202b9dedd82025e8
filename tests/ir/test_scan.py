"""torch's scans as one op each: what is captured, its factors proved on shards, its work, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

from autopar.cost_model.compute.flops import training_flops
from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel, call_nodes, tensor_operands
from autopar.ir.ops.scan import num_combinations
from autopar.ir.rules import MissingRuleWarning, rule_for
from autopar.ir.rules.proof import check, runner
from autopar.ir.rules.saved import saved_for_backward
from autopar.passes.normalise import normalise

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Scanning(nn.Module):
    """Applies ``step(module)`` along dimension 1 of (batch, steps, channels)."""

    def __init__(self, step: Callable[[Scanning], Step], width: int = 4) -> None:
        super().__init__()
        self.mix, self.rate = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = scan(self.step(self), x.new_zeros(len(x), x.shape[-1]), x, dim=1)[1]
        return states.square().sum()


def mixing(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(state @ module.mix + x)
        return new, new.clone()

    return step


def decaying(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = state * torch.sigmoid(module.rate) + x.view(1, *x.shape)[0]
        return new, 2 * new

    return step


class Associating(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def combine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return a[0] * b[0], a[1] * b[0] + b[1]

        gate = torch.sigmoid(x)
        states: Tensor = associative_scan(combine, (gate, x), dim=1, combine_mode="generic")[1]
        return states.square().sum()


def captured(model: nn.Module, *shape: int) -> CapturedModel:
    return normalise(capture(model, (torch.randn(*shape),)))


def the_scan(model: CapturedModel) -> fx.Node:
    (found,) = (node for node in call_nodes(model.graph) if "scan" in node.name and "getitem" not in node.name)
    return found


def values_of(node: fx.Node, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(o.meta["val"].shape, generator=generator) for o in tensor_operands(node)]


@pytest.mark.parametrize(("step", "factors"), [(mixing, 1), (decaying, 2)])
def test_dimensions_that_a_step_keeps_apart_are_factors(step: Callable[[Scanning], Step], factors: int) -> None:
    node = the_scan(captured(Scanning(step), 6, 5, 4))
    rule = rule_for(node)
    assert len(rule.shardable()) == factors
    for choice in rule.shardable():
        assert check(runner(node), values_of(node), rule, choice, tolerance=1e-5) is None


@pytest.mark.parametrize("length", [2, 3, 8, 13])
def test_an_associative_scan_divides_by_all_but_its_steps(length: int) -> None:
    node = the_scan(captured(Associating(), 6, length, 4))
    rule = rule_for(node)
    assert len(rule.shardable()) == 2
    for choice in rule.shardable():
        assert check(runner(node), values_of(node), rule, choice, tolerance=1e-5) is None
    gates, inputs = values_of(node)
    state, states = torch.zeros_like(inputs[0]), []
    for gate, x in zip(gates, inputs, strict=True):
        state = gate * state + x
        states.append(state)
    torch.testing.assert_close(node.target(gates, inputs)[1], torch.stack(states))  # type: ignore[operator]


def test_work_is_that_of_all_steps() -> None:
    node = the_scan(captured(Scanning(mixing), 6, 5, 4))
    # A product, a sum and a tangent for each of five steps; backward as much for each operand.
    assert rule_for(node).flops == 5 * (2 * 6 * 4 * 4 + 6 * 4 + 6 * 4)
    assert training_flops(node, rule_for(node)) == 3 * rule_for(node).flops
    # Every step keeps its state, which is what its product and its tangent need.
    assert saved_for_backward(node).extra_bytes == 5 * 6 * 4 * 4


def test_work_of_an_associative_scan_is_that_of_its_tree() -> None:
    node = the_scan(captured(Associating(), 6, 7, 4))
    # 3 pairs, then 1; then the odd places of the inner level (1), and the even ones of the outer (3).
    assert num_combinations(7) == 3 + 1 + 1 + 3
    assert rule_for(node).flops == 8 * 3 * 6 * 4


def test_layers_that_scan_alike_call_one_op() -> None:
    model = nn.ModuleList([Scanning(mixing), Scanning(mixing)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) + self.layers[1](x)  # type: ignore[no-any-return]

    targets = {node.target for node in call_nodes(captured(Both(), 6, 5, 4).graph) if node.name.startswith("scan")}
    assert len(targets) == 1


class Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (0.1 / grad.norm()).clamp(max=1.0)


def limiting(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = Limited.apply(state * module.rate) + x
        return new, new.clone()

    return step


def test_a_backward_that_is_not_linear_makes_that_of_the_scan_so() -> None:
    with pytest.warns(MissingRuleWarning, match="Limited.* every rank repeats it"):
        rule = rule_for(the_scan(captured(Scanning(limiting), 6, 5, 4)))
    assert rule.nonlinear
    assert not rule.shardable()


def drawing(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = nn.functional.dropout(state + x, 0.5)
        return new, new.clone()

    return step


def widening(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (state + x).double(), x.clone()

    return step


def leaking(module: Scanning) -> Step:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        module.rate.data.add_(state.detach().mean(0))
        return state + x, x.clone()

    return step


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (drawing, r"draws random numbers in a step(.|\n)*test_scan\.py"),
        (widening, r"changes shape or dtype of its state(.|\n)*test_scan\.py"),
        (leaking, r"writes to a tensor outside(.|\n)*test_scan\.py"),
    ],
)
def test_a_step_that_is_no_function_is_refused(step: Callable[[Scanning], Step], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        captured(Scanning(step), 6, 5, 4)


def test_a_value_of_one_step_is_not_used_outside() -> None:
    class Leaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []

            def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                kept.append(state + x)
                return state * x, x.clone()

            total: Tensor = scan(step, x.new_zeros(len(x), 4), x, dim=1)[1].sum() + kept[0].sum()
            return total

    with pytest.raises(CaptureError, match=r"one step outside of its scan(.|\n)*test_scan\.py"):
        captured(Leaking(), 6, 5, 4)
