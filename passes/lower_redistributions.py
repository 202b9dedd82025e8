"""Lower-redistributions: each change of layout becomes the collective that carries it out, with its conjugate.

y_1 = redistribution(y, axis='tp', forward='all_reduce', backward='none')
y_1 = all_reduce(y, group='tp', backward='none')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from autopar.ir.graph import call_nodes
from autopar.ir.primitives.collectives import step_call
from autopar.ir.primitives.redistribution_marker import redistribution, step_of
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class LowerRedistributions(Pass[PlacedProgram]):
    """Replace redistribution steps by the collectives that carry them out."""

    name: ClassVar[str] = "lower-redistributions"
    requires: ClassVar[frozenset[str]] = frozenset({"redistributions", "local shapes"})
    provides: ClassVar[frozenset[str]] = frozenset({"collectives"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"collectives"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        mesh = program.placed.mesh
        for node in call_nodes(program.graph):
            if node.target is redistribution:
                function, kwargs = step_call(step_of(mesh, **cast("dict[str, Any]", node.kwargs)), mesh)
                node.target, node.kwargs = function, kwargs
        return program
