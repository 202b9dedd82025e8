"""Functions traced below autograd, apart from the trace of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.torch_private import LOG_SOFTMAX_BACKWARD, SOFTMAX_BACKWARD, decompositions

aten = torch.ops.aten

# Backwards that are linear, as rearrangements of zeros. Those of norms take the derivative of their statistics into
# account, which what they come down to would not.
_LINEAR = (
    aten.select_backward,
    aten.slice_backward,
    aten.diagonal_backward,
    aten.unfold_backward,
    aten.embedding_dense_backward,
    SOFTMAX_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
)

# Ops that take of their operand the shape alone -> what they fill it with.
_FILLED = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
}

# Writes of nothing but the shape of a temporary.
_RESHAPED_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}


def traced(function: Callable[..., list[Tensor]], values: Sequence[Tensor]) -> fx.GraphModule:
    """``function`` of tensors as ATen ops. Call it apart, with the mode of fake ``values`` active.

    What autograd kept appears as ``detach``.
    """
    module: fx.GraphModule = make_fx(function, decomposition_table=_decompositions())(*values)
    for node in module.graph.nodes:
        if node.target in _RESHAPED_IN_PLACE:
            node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, own=node: user is not own)
            node.target = _RESHAPED_IN_PLACE[node.target]
        if node.target in _FILLED:
            # Of no tensor: its operand may be a sum over the batch, or have other rows.
            value = node.meta["val"]
            node.args, node.kwargs = (list(value.shape), _FILLED[node.target]), {"dtype": value.dtype}
            node.target = aten.full.default
    module.recompile()
    return module


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return decompositions(_LINEAR)
