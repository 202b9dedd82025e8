"""Hooks: one op in the tensor's place, or refused with the line that registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError


class Model(nn.Module):
    """``touch`` does something to an activation."""

    def __init__(self, touch: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.touch = nn.Linear(6, 6), nn.Linear(6, 4), touch

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        early = h.tanh()
        self.touch(self, h)
        return self.second(h + early).square().mean()  # type: ignore[no-any-return]


def graph_of(model: nn.Module) -> fx.Graph:
    return capture(model, torch.zeros(8, 6)).graph


def double(*args: Any) -> Any:
    return 2.0 * args[-1]


def test_a_hook_takes_its_tensor_s_place_for_all_that_read_it() -> None:
    graph = graph_of(Model(lambda model, h: h.register_hook(double)))
    (hooked,) = (node for node in graph.nodes if isinstance(node.target, FunctionOp))
    assert {user.name for user in hooked.users} == {"tanh_default", "add_tensor"}
    assert list(hooked.args[0].users) == [hooked]


def _hook_on_module(model: nn.Module, h: Tensor) -> None:
    model.get_submodule("second").register_full_backward_hook(lambda *args: None)


def _pack(model: nn.Module, h: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        h.tanh()


@pytest.mark.parametrize(
    ("touch", "text"),
    [
        (lambda model, h: h.register_hook(print), "a gradient hook returns nothing"),
        (lambda model, h: h.register_hook(double).remove(), "removes a hook"),
        (lambda model, h: model.second.weight.register_hook(double), "registers a hook on a parameter"),
        (lambda model, h: h.retain_grad(), "keeps the gradient of an activation"),
        (lambda model, h: h.sum().backward(), "runs a backward"),
        (lambda model, h: h.grad_fn.register_hook(double), "registers a hook on a node of autograd"),
        (_hook_on_module, "registers a backward hook on a module"),
        (_pack, "packs what autograd saves"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_with_its_line(touch: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        graph_of(Model(touch))
    assert "test_hooks.py" in str(caught.value)


def _on_parameter(model: nn.Module) -> None:
    next(model.parameters()).register_hook(double)


def _after_accumulation(model: nn.Module) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(double)


def _on_module(model: nn.Module) -> None:
    model.get_submodule("second").register_full_backward_hook(double)


def _before_module(model: nn.Module) -> None:
    model.get_submodule("second").register_full_backward_pre_hook(double)


@pytest.mark.parametrize("register", [_on_parameter, _after_accumulation, _on_module, _before_module])
def test_hooks_that_a_model_came_with(register: Callable[[nn.Module], None]) -> None:
    model = Model(double)
    register(model)
    with pytest.raises(CaptureError, match=r"test_hooks.py:\d+ in double"):
        graph_of(model)


def test_a_hook_on_all_modules() -> None:
    handle = register_module_forward_hook(lambda module, args, result: None)
    try:
        with pytest.raises(CaptureError, match="a hook is on all modules"):
            graph_of(Model(double))
    finally:
        handle.remove()


def test_hooks_on_forwards_are_traced() -> None:
    model = Model(lambda model, h: None)
    model.first.register_forward_hook(lambda module, args, result: 3.0 * result)
    model.second.register_forward_pre_hook(lambda module, args: (args[0].relu(),))
    names = [node.name for node in graph_of(model).nodes]
    assert "mul_tensor" in names
    assert "relu_default" in names


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_is_traced(reentrant: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.first, x, use_reentrant=reentrant)
            return self.second(h).square().mean()  # type: ignore[no-any-return]

    targets = [node.target for node in graph_of(Checkpointed(double)).nodes]
    assert targets.count(torch.ops.aten.linear.default) == 2
    # A reentrant checkpoint of what needs no gradient gives its parameters none.
    assert (torch.ops.aten.detach.default in targets) == reentrant
