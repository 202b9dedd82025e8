"""Autograd functions in a captured graph: one op each, whose rule holds for its own backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.ir.analysis.batch_and_sequence import find_roles, microbatch_obstacle
from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.ir.rule import FactorRule
from autopar.ir.rules import MissingRuleWarning, rule_for


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.scale * grad, None


class RowsLimited(Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / grad.norm(dim=-1, keepdim=True).clamp(min=ctx.scale), None


class WholeLimited(Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / grad.norm().clamp(min=ctx.scale), None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), 2.0 * x.t() @ grad


class Noisy(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x + torch.rand_like(x)


class NoisyBackward(Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + torch.rand_like(grad), None


class Counting(Scaled):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        Counting.calls += 1
        ctx.scale = scale
        return x.view_as(x)


class InPlace(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.mul_(scale).clone()


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)  # type: ignore[no-any-return]  # of a module

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Model(nn.Module):
    """One function between two layers; ``on_weight``: on the weight of the second."""

    def __init__(self, function: Any, *, on_weight: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)
        self.apply_function, self.on_weight = function.apply, on_weight

    def forward(self, x: Tensor) -> Tensor:
        h, weight = self.first(x), self.second.weight
        if self.on_weight:
            weight = self.apply_function(weight, 0.5)
        else:
            h = self.apply_function(h, 0.5)
        return nn.functional.linear(h, weight, self.second.bias).square().mean()


def captured(model: nn.Module, rows: int = 8) -> CapturedModel:
    return capture(model, torch.zeros(rows, 6))


def function_of(model: CapturedModel) -> fx.Node:
    (node,) = (node for node in model.graph.nodes if isinstance(node.target, FunctionOp))
    assert isinstance(node, fx.Node)
    return node


def rule_of(model: nn.Module) -> FactorRule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingRuleWarning)
        return rule_for(function_of(captured(model)))


def test_a_function_is_one_op() -> None:
    node = function_of(captured(Model(Scaled)))
    assert node.args[1] == 0.5
    assert node.meta["source"].endswith("h = self.apply_function(h, 0.5)")
    assert rule_of(Model(Scaled)).shardable() == ("f0", "f1")
    assert not rule_of(Model(Scaled)).nonlinear


def test_rows_are_divided_where_the_backward_works_row_by_row() -> None:
    rule = rule_of(Model(RowsLimited))
    (rows, columns), *_ = rule.operands
    assert set(rule.shardable()) == set(rows)
    assert set(columns) <= rule.blocked
    assert rule.nonlinear


def test_a_limit_that_only_large_gradients_meet_is_found() -> None:
    class Rarely(WholeLimited):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad / (grad.norm() / 100).clamp(min=1.0), None

    with pytest.warns(MissingRuleWarning, match="every rank repeats it"):
        assert not rule_for(function_of(captured(Model(Rarely)))).shardable()


def test_operands_that_are_contracted() -> None:
    class Contracting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 10))

        def forward(self, x: Tensor) -> Tensor:
            return Linear.apply(x, self.weight).square().mean()  # type: ignore[no-any-return]

    rule = rule_of(Contracting())
    (b, k), (k2, n) = rule.operands
    assert rule.results == ((b, n),)
    assert k == k2
    assert rule.summed == {*k}
    assert rule.flops == 2 * 8 * 6 * 10


@pytest.mark.parametrize("function", [RowsLimited, WholeLimited])
def test_a_weight_whose_gradient_is_not_linear_takes_one_microbatch(function: Any) -> None:
    model = captured(Model(function, on_weight=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingRuleWarning)
        obstacle = microbatch_obstacle(model, find_roles(model))
    assert obstacle is not None
    assert "needs the gradient of the whole batch at once" in obstacle


def test_a_weight_whose_gradient_is_linear_takes_microbatches() -> None:
    model = captured(Model(Scaled, on_weight=True))
    assert microbatch_obstacle(model, find_roles(model)) is None


def test_a_function_that_draws_random_numbers_is_repeated_on_every_rank() -> None:
    assert not rule_of(Model(Noisy)).shardable()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (NoisyBackward, "draws random numbers in its backward"),
        (Counting, "keeps something of a call"),
        (InPlace, "without ctx.mark_dirty"),
    ],
)
def test_what_cannot_be_one_op_is_refused_with_its_line(function: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        captured(Model(function))
    assert "h = self.apply_function(h, 0.5)" in str(caught.value)


def test_a_function_that_reads_what_forward_changes_is_refused() -> None:
    class Quantised(Scaled):
        levels = 4.0

        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return torch.round(x * Quantised.levels) / Quantised.levels

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            Quantised.levels = 2.0
            return Quantised.apply(self.linear(x), 1.0).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"reads Quantised\.levels, which forward changes"):
        capture(Changing(), torch.randn(4, 8))


def test_a_parameter_behind_its_back_is_refused() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return OfModule.apply(self.first(x), self.second).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="reads a tensor of the model of shape"):
        captured(Behind())


def test_without_a_gradient_the_ops_inside_are_seen() -> None:
    class OnInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = Scaled.apply(x, 2.0)
            return self.layer(x).square().mean()  # type: ignore[no-any-return]

    assert not any(isinstance(node.target, FunctionOp) for node in captured(OnInputs()).graph.nodes)


def test_a_parameter_of_the_original_model_is_refused() -> None:
    model = Model(Scaled)

    class Reading(Scaled):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * model.second.weight.sum(), None

    model.apply_function = Reading.apply
    with pytest.raises(CaptureError, match="that is not among its arguments"):
        captured(model)
