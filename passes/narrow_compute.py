"""Narrow-compute: casts to the dtype of compute, and the true dtype of every value.

Every op is run on fake local tensors, collectives included: what it gives must have the shape that its placements
promise, and tells the dtype. Ops that look alike are run once.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.matrix_products import is_product
from autopar.ir.building import fake_call, fake_mode_of
from autopar.ir.graph import call_nodes
from autopar.ir.precision import narrow_dtype
from autopar.ir.primitives.group_communication import unbound_groups
from autopar.ir.torch_private import TO_COPY
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram
from autopar.passes.verify.well_formed import signature_of, summary_of


@dataclass(frozen=True)
class NarrowCompute(Pass[PlacedProgram]):
    """Floating point work inside blocks is in the dtype of the plan's precision.

    What comes from outside the blocks (step inputs, positions, masks) is cast where it meets a tensor of that dtype,
    and what a block computes in float32 (a softmax that asks for it) where a matrix product takes both.
    """

    name: ClassVar[str] = "narrow-compute"
    requires: ClassVar[frozenset[str]] = frozenset({"local shapes", "lowered ops", "collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"true dtypes"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"true dtypes"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        graph, compute = program.graph, narrow_dtype(program.placed.plan.precision)
        memo: dict[Any, Any] = {}
        parameters = program.placed.captured.parameters
        histories = {name for name, buffer in program.placed.captured.buffers.items() if buffer.history}
        outside = {node for node in graph.nodes if node.op == "placeholder" and node.name not in parameters}
        mode = fake_mode_of(graph)
        with unbound_groups(program.placed.mesh):
            for node in call_nodes(graph):
                if node.meta["block"] == PRELUDE or (node.all_input_nodes and outside.issuperset(node.all_input_nodes)):
                    outside.add(node)  # parts of what comes from outside do too
                elif compute is not None:
                    _cast_operands(graph, node, compute, outside, histories)
                signature = (node.target, signature_of(node.args), signature_of(node.kwargs))
                if signature not in memo:
                    memo[signature] = fake_call(node.target, node.args, node.kwargs, mode)  # type: ignore[arg-type]
                promised, found = summary_of(node.meta["val"]), summary_of(memo[signature])
                assert [_shape(p) for p in promised] == [_shape(f) for f in found], (
                    f"{node.format_node()}\n  gives {found}, its placements promise {promised}\n"
                    f"  at {node.meta.get('source')}"
                )
                node.meta["val"] = memo[signature]
        return program


def _shape(leaf: object) -> object:
    return leaf[0] if isinstance(leaf, tuple) else None


def _cast_operands(
    graph: fx.Graph, node: fx.Node, compute: torch.dtype, outside: set[fx.Node], histories: Container[str]
) -> None:
    """Cast float32 operands if another operand has the dtype of compute: those from ``outside`` the blocks, and all of
    a matrix product, which takes one dtype, but for ``histories`` of maxima, which it writes to.
    """
    values = {operand: operand.meta.get("val") for operand in node.all_input_nodes}
    if not any(isinstance(v, torch.Tensor) and v.dtype == compute for v in values.values()):
        return
    for operand, value in values.items():
        if (
            (operand.op == "placeholder" or operand in outside or is_product(node.target))
            and not operand.meta.get("wide")
            and operand.name not in histories
            and isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
        ):
            with graph.inserting_before(node):
                cast = graph.call_function(TO_COPY, (operand,), {"dtype": compute})
            cast.meta.update(operand.meta)
            cast.meta.update(val=value.to(compute), block=node.meta["block"])
            node.replace_input_with(operand, cast)
