"""Lower-ops: an op that is sharded on a lowered factor becomes its sharded form, with collectives inside.

embedding(v, tokens)      v sharded on its rows over tp    ->    sharded_embedding(v, tokens, groups=('tp',))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.graph import is_getitem
from autopar.ir.lowered.table import LOWERINGS
from autopar.passes.contract import Pass
from autopar.passes.placed_program import PlacedProgram


@dataclass(frozen=True)
class LowerOps(Pass[PlacedProgram]):
    """Replace ops sharded on a lowered factor by their sharded forms."""

    name: ClassVar[str] = "lower-ops"
    requires: ClassVar[frozenset[str]] = frozenset({"local shapes"})
    provides: ClassVar[frozenset[str]] = frozenset({"lowered ops"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"lowered ops"})

    def apply(self, program: PlacedProgram) -> PlacedProgram:
        placed = program.placed
        for node, captured in program.origin.items():
            if is_getitem(captured) or node.graph is not program.graph:
                continue
            name = placed.lowering(captured)
            if name is None:
                continue
            rule, assignment = placed.analysis.rule(captured), placed.layouts.assignments[captured]
            function, args, kwargs = LOWERINGS[name](node, rule, assignment, placed.mesh)
            if placed.zigzag is not None and captured in placed.zigzag.attentions:
                kwargs["zigzag_ranks"] = placed.zigzag_ranks
                kwargs["by_documents"] = placed.zigzag.documents is not None
            node.target, node.args, node.kwargs = function, args, kwargs
        return program
