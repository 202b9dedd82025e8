"""Fused steps of torch's optimisers on DTensors.

DTensor knows how the fused steps of Adam and AdamW are spread, not those of SGD and Adagrad. All of them work element
by element on parameters, gradients and states that are placed alike, so that each rank steps its own parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

_STEPS = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_)


def register_fused_steps() -> None:
    """Have DTensor step local parts, for the optimisers that it does not know."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for step in _STEPS:
        for overload in step.overloads():
            handlers.setdefault(getattr(step, overload), _step_local_parts)


def _step_local_parts(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return op_call(*_local(args), **_local(kwargs))


def _local(arguments: Any) -> Any:
    return pytree.tree_map_only(DTensor, lambda value: value._local_tensor, arguments)
