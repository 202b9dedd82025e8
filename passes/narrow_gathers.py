"""Narrow-gathers: what products by tensor alone read is gathered in 8 bits.

h = all_gather(x, dim=1, group='tp', backward='reduce_scatter')
y = scaled_linear(h, w, recipe='fp8-tensor', ..)

h = narrow_all_gather(x, dim=1, group='tp', backward='reduce_scatter', recipe='fp8-tensor', maxima_groups=('dp', 'tp'))
y = scaled_linear(h, w, recipe='fp8-tensor', ..)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.ir.analysis.narrow_activations import reads_narrow, takes_narrow_gradient
from autopar.ir.graph import call_nodes, tensor_operands
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.ops.op_recipes import recipe_of
from autopar.ir.placement import Layout
from autopar.ir.primitives.collectives import COLLECTIVES, all_gather, reduce_scatter
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class NarrowGathers(Pass[PlacedProgram]):
    """Replace gathers of activations, and of gradients, by those in 8 bits where products by tensor alone read them.

    Each product would quantise the whole as its parts are quantised here: no number changes.
    """

    name: ClassVar[str] = "narrow-gathers"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives", "lowered ops"})
    provides: ClassVar[frozenset[str]] = frozenset({"narrow gathers"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"true dtypes", "narrow gathers"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        names = program.placed.mesh.names

        def groups(layout: Layout) -> tuple[str, ...]:
            return tuple(name for name, own in zip(names, layout, strict=True) if not own.is_replicate())

        for node in call_nodes(program.graph):
            if node.target not in (all_gather, reduce_scatter):
                continue
            source = node.args[0]
            assert isinstance(source, fx.Node), "a collective of a tensor"
            if source.target in COLLECTIVES or any(user.target in COLLECTIVES for user in node.users):
                continue
            if node.target is all_gather:
                products = list(node.users)
                if products and all(_read_narrow(node, user) for user in products):
                    options = {"recipe": recipe_of(products[0]), "maxima_groups": groups(source.meta["layout"])}
                    node.target, node.kwargs = narrow_all_gather, {**node.kwargs, **options}
            elif takes_narrow_gradient(source) and len(source.users) == 1:
                options = {"recipe": recipe_of(source), "maxima_groups": groups(node.meta["layout"])}
                node.target, node.kwargs = narrowing_reduce_scatter, {**node.kwargs, **options}
        return program


def _read_narrow(node: fx.Node, user: fx.Node) -> bool:
    positions = [position for position, operand in enumerate(tensor_operands(user)) if operand is node]
    return all(reads_narrow(user, position) for position in positions)
