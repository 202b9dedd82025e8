"""Fused steps of torch's optimisers on DTensors.

DTensor knows how the fused steps of Adam and AdamW are spread, not those of SGD and Adagrad. All of them work element
by element on parameters, gradients and states that are placed alike, so that each rank steps its own parts.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from autopar.ir.torch_private import local_tensor, pytree
from autopar.runtime.torch_private import FUSED_STEPS, in_dtensors


def register_fused_steps() -> None:
    """Have DTensor step local parts, for the optimisers that it does not know."""
    for step in FUSED_STEPS:
        for overload in step.overloads():
            in_dtensors(getattr(step, overload), _step_local_parts)


def _step_local_parts(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return op_call(*_local(args), **_local(kwargs))


def _local(arguments: Any) -> Any:
    return pytree.tree_map_only(DTensor, local_tensor, arguments)
