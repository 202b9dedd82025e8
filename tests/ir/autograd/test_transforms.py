"""Transforms of functions and derivatives inside forward: plain ops with the gradients of the model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir.analysis.batch_and_sequence import find_roles, microbatch_obstacle
from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError
from tests.cases import flexible_attention, penalty_physics, transforms_derivatives, transforms_ensemble

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """``function`` of the module and an activation."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(6, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x)).square().mean()


def difference(model: nn.Module, *inputs: Tensor) -> float:
    """Largest relative error of the loss and of any gradient of the captured graph."""
    captured = capture(model, inputs)
    if isinstance(model, Model):
        assert microbatch_obstacle(captured, find_roles(captured)) is None
    supply = iter(inputs)
    parameters = [model.get_parameter(p.name) for p in captured.parameters.values()]
    values = [
        model.get_parameter(captured.parameters[node.name].name) if node.name in captured.parameters else next(supply)
        for node in captured.graph.nodes
        if node.op == "placeholder"
    ]
    got, wanted = fx.Interpreter(captured.graph_module).run(*values)[0], model(*inputs)
    worst = float((got - wanted).detach().abs() / wanted.detach().abs())
    mine, theirs = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (got, wanted))
    # A gradient that is zero but for rounding (of a bias of keys) is no measure.
    least = 1e-3 * float(sum(grad.square().sum() for grad in theirs if grad is not None) ** 0.5)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            worst = max(worst, float((a - b).norm() / b.norm().clamp(min=least)))
    return worst


def slope(model: Any, h: Tensor) -> Tensor:
    out = model.second(h).sigmoid()
    return torch.autograd.grad(out.sum(), h, create_graph=True)[0]


def slope_of_selection(model: Any, h: Tensor) -> Tensor:
    out = F.layer_norm(model.second(h), (8,)).softmax(-1)[:, 1:5].cumsum(-1)[:, 2]
    return torch.autograd.grad(out, h, torch.ones_like(out), create_graph=True)[0] + out[:, None]


def fixed_slope(model: Any, h: Tensor) -> Tensor:
    out = model.second(h).tanh()
    return torch.autograd.grad(out.sum(), h, retain_graph=True)[0] * out


def unused(model: Any, h: Tensor) -> Tensor:
    other = model.second(h)
    found = torch.autograd.grad(h.exp().sum(), (h, other), create_graph=True, allow_unused=True)
    assert found[1] is None
    return found[0] + other


def vectorised(model: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.detach() * F.linear(row, model.second.weight).softmax(0), chunk_size=4)(h)


def jacobian(model: Any, h: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(lambda a: model.second(a).tanh().sum(0), h, create_graph=True).sum((0, 2))


@pytest.mark.parametrize("function", [slope, slope_of_selection, fixed_slope, unused, vectorised, jacobian])
def test_gradients_are_those_of_the_model(function: Any) -> None:
    assert difference(Model(function), X) < 1e-5


@pytest.mark.parametrize("case", [flexible_attention, penalty_physics, transforms_derivatives, transforms_ensemble])
def test_the_cases(case: Any) -> None:
    torch.manual_seed(0)
    assert difference(case.model(), *case.batch(0)) < 1e-5


def without_gradient(model: Any, h: Tensor) -> Tensor:
    def cut(row: Tensor) -> Tensor:
        with torch.no_grad():
            return row.exp()

    return torch.vmap(cut)(h) + h


def detached(model: Any, h: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda row: (row * row.detach()).sum()))(h)


def through_dropout(model: Any, h: Tensor) -> Tensor:
    out = F.dropout(model.second(h), 0.5)
    return torch.autograd.grad(out.sum(), h, create_graph=True)[0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2.0 * grad


def through_function(model: Any, h: Tensor) -> Tensor:
    return torch.autograd.grad(Twice.apply(h).exp().sum(), h, create_graph=True)[0]


def function_in_vmap(model: Any, h: Tensor) -> Tensor:
    return torch.vmap(Twice.apply)(h)  # type: ignore[no-any-return]


class Vectorised(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def straight_through_in_vmap(model: Any, h: Tensor) -> Tensor:
    return torch.vmap(Vectorised.apply)(h)  # type: ignore[no-any-return]


def batched(model: Any, h: Tensor) -> Tensor:
    out = model.second(h)
    return torch.autograd.grad(out, h, torch.ones(3, 8, 8), is_grads_batched=True, create_graph=True)[0]


def attention(model: Any, h: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])
    return torch.autograd.grad(out.sum(), h, create_graph=True)[0]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (without_gradient, "under no_grad"),
        (detached, "detaches a tensor"),
        (through_dropout, "would draw other random numbers"),
        (through_function, "differentiates twice through the autograd function Twice"),
        (function_in_vmap, "Twice"),
        (straight_through_in_vmap, "its backward is lost"),
        (batched, "is_grads_batched"),
        (attention, "differentiates twice what torch cannot"),
    ],
)
def test_what_is_refused_says_where(function: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        capture(Model(function), X)
    assert "test_transforms.py:" in str(caught.value)
