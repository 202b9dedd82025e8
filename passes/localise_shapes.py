"""Localise-shapes: values and arguments of a program have the sizes of one rank and one microbatch.

x (8, 64), up (256, 64), tp of 4 ranks:          v = view(h, [8, 256])     ->     v = view(h, [8, 64])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.graph import is_getitem, tensor_results
from autopar.ir.placement import local_shape
from autopar.ir.rules.sizes import local_arguments
from autopar.ir.torch_private import pytree
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class LocaliseShapes(Pass[PlacedProgram]):
    """Replace global sizes of values and arguments by those of one rank and one microbatch."""

    name: ClassVar[str] = "localise-shapes"
    requires: ClassVar[frozenset[str]] = frozenset({"redistributions"})
    provides: ClassVar[frozenset[str]] = frozenset({"local shapes"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"local shapes", "collectives", "lowered ops"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        placed = program.placed
        mesh = placed.time_and_mesh
        values: dict[fx.Node, object] = {}
        for node in program.graph.nodes:
            captured = program.origin.get(node)
            if captured is None or is_getitem(captured):
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    whole = (node.meta["over_time"], *node.meta["layout"])
                    values[node] = value.new_empty(local_shape(value.shape, whole, mesh))
                continue
            choices = (placed.time_choice(captured), *placed.layouts.assignments[captured])
            rule = placed.analysis.rule(captured)
            shapes = [
                local_shape(result.shape, rule.result_layout(number, choices), mesh)
                for number, result in enumerate(tensor_results(captured))
            ]
            if shapes:
                # Sizes are those of global values, which all operands have until the end.
                node.args, node.kwargs = local_arguments(node, shapes[0])
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            fresh = iter(shapes)
            own = [leaf.new_empty(next(fresh)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            values[node] = pytree.tree_unflatten(own, spec)
        for node, local in values.items():
            node.meta["val"] = local
        return program
