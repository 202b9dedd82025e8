"""Settle the values of a local program: casts for narrow compute, true dtypes, and a check of every shape.

Every op is run on fake local tensors, collectives included: what it gives must have the shape that its
placements promise, and tells the dtype. Ops that look alike are run once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.building import fake_call, fake_mode_of
from autopar.ir.mesh import Mesh
from autopar.ir.primitives.group_communication import unbound_groups
from autopar.ir.torch_private import TO_COPY
from autopar.passes.shard import PRELUDE
from autopar.passes.verify.well_formed import signature_of, summary_of


def settle(graph: fx.Graph, mesh: Mesh, compute: torch.dtype | None) -> None:
    """Run ``graph`` on fake tensors, in place: add casts to ``compute``, enter true values, verify shapes.

    compute: dtype of floating point work inside blocks, None for that of the model. What comes from outside the
    blocks (step inputs, positions, masks) is cast where it meets a tensor of that dtype.
    """
    memo: dict[Any, Any] = {}
    outside: set[fx.Node] = set()
    mode = fake_mode_of(graph)
    with unbound_groups(mesh):
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.meta["block"] == PRELUDE or (node.all_input_nodes and outside.issuperset(node.all_input_nodes)):
                outside.add(node)  # parts of what comes from outside do too
            elif compute is not None:
                _cast_operands(graph, node, compute, outside)
            signature = (node.target, signature_of(node.args), signature_of(node.kwargs))
            if signature not in memo:
                memo[signature] = fake_call(node.target, node.args, node.kwargs, mode)
            promised, found = summary_of(node.meta["val"]), summary_of(memo[signature])
            assert [_shape(p) for p in promised] == [_shape(f) for f in found], (
                f"after shard: {node.format_node()}\n  gives {found}, its placements promise {promised}\n"
                f"  at {node.meta.get('source')}"
            )
            node.meta["val"] = memo[signature]


def _shape(leaf: object) -> object:
    return leaf[0] if isinstance(leaf, tuple) else None


def _cast_operands(graph: fx.Graph, node: fx.Node, compute: torch.dtype, outside: set[fx.Node]) -> None:
    """Cast wide operands that come from ``outside`` the blocks, if another operand has the dtype of compute."""
    values = {operand: operand.meta.get("val") for operand in node.all_input_nodes}
    if not any(isinstance(v, torch.Tensor) and v.dtype == compute for v in values.values()):
        return
    for operand, value in values.items():
        if (
            (operand.op == "placeholder" or operand in outside)
            and not operand.meta.get("wide")
            and isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
        ):
            with graph.inserting_before(node):
                cast = graph.call_function(TO_COPY, (operand,), {"dtype": compute})
            cast.meta.update(operand.meta)
            cast.meta.update(val=value.to(compute), block=node.meta["block"])
            node.replace_input_with(operand, cast)
