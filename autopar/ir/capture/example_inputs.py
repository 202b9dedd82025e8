"""Example inputs of another batch or other lengths, to capture a model with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.capture.flat_call import Call
from autopar.ir.capture.symbols import named_dims
from autopar.ir.torch_private import pytree


def at_sizes(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    example_target: Any,
    sizes: Mapping[str, int],
) -> tuple[Any, Any]:
    """Example inputs and target at other sizes, by name of their symbols. Of the tensors only shapes mean something."""
    tensors = Call.of(model, example_inputs, loss_fn, example_target).tensors
    names = {id(tensor): dims for tensor, dims in zip(tensors, named_dims(tensors), strict=True)}

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        dims = names.get(id(tensor), {})
        return tensor.new_zeros([sizes.get(dims.get(dim, ""), size) for dim, size in enumerate(tensor.shape)])

    found: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, resized, (example_inputs, example_target))
    return found
