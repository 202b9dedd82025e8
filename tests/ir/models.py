"""Small models for capture tests, and a check of a captured graph against the model it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.capture.flat_call import split_example
from autopar.ir.graph import CapturedModel


def run_captured(captured: CapturedModel, model: nn.Module, example_inputs: Any, target: Any = None) -> tuple[Any, ...]:
    """Interpret the graph on the model's own parameters: the flat outputs."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    values: dict[str, Any] = {name: p.of(parameters[p.whole_names[0]]) for name, p in captured.parameters.items()}
    values |= {name: buffers[b.name].clone() for name, b in captured.buffers.items()} | captured.constants
    args, kwargs = split_example(example_inputs)
    kwargs = {key: value for key, value in kwargs.items() if key != "target" or target is None}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    assert spec == captured.in_spec
    supply = [leaf for leaf in leaves + pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    values |= dict(zip(captured.inputs, supply, strict=True))
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    captured.graph_module.recompile()
    result = captured.graph_module(*(values[name] for name in placeholders))
    assert isinstance(result, tuple)
    return result


def assert_same_training(
    captured: CapturedModel,
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    tolerance: float = 2e-5,
) -> None:
    """Loss, gradients and updated buffers of the graph equal those of the model in train mode."""
    twin = copy.deepcopy(model).train()
    args, kwargs = split_example(example_inputs)
    torch.manual_seed(0)
    output = twin(*args, **kwargs)
    loss = loss_fn(output, target) if loss_fn is not None else output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    model.zero_grad()
    torch.manual_seed(0)
    results = run_captured(captured, model, example_inputs, target)
    assert captured.has_loss
    torch.testing.assert_close(results[0], loss, rtol=tolerance, atol=tolerance)
    results[0].backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    total = torch.stack([g.norm() for g in expected.values() if g is not None]).norm()
    for name, parameter in model.named_parameters():
        left, right = parameter.grad, expected[name]
        assert (left is None) == (right is None), name
        if left is not None and right is not None:
            assert (left - right).norm() <= tolerance * max(right.norm(), 1e-5 * total), name
    updated = [buffer for buffer in captured.buffers.values() if buffer.updated_by is not None]
    after = dict(twin.named_buffers())
    for buffer, value in zip(updated, results[len(results) - len(updated) :], strict=True):
        torch.testing.assert_close(value, after[buffer.name])
    changed = {n for n, b in model.named_buffers() if not torch.equal(b, after[n])}
    assert changed <= {buffer.name for buffer in updated}
