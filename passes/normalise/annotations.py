"""``autopar.constrain`` becomes an op that copies nothing.

constrain(x, "tp=2")            annotated(x, placements="tp=2")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.annotations import CONSTRAIN
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.ops.composite import annotated
from autopar.passes.contract import Pass


@dataclass(frozen=True)
class ReadAnnotations(Pass[CapturedModel]):
    """Keeps the user's annotations as ops that lead, with one result placement allowed on each axis they name."""

    name: ClassVar[str] = "read-annotations"
    provides: ClassVar[frozenset[str]] = frozenset({"annotations"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        for node in call_nodes(captured.graph):
            if node.target is CONSTRAIN:
                node.target, node.args, node.kwargs = annotated, node.args[:1], {"placements": node.args[1]}
        return captured
