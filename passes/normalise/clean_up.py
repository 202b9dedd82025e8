"""Remove what other rewrites left behind: views of views, repeated ops. See ``autopar.ir.capture.simplify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.capture.simplify import simplify
from autopar.ir.graph import CapturedModel
from autopar.passes.contract import Pass


@dataclass(frozen=True)
class CleanUp(Pass[CapturedModel]):
    """No-op views and casts, common subexpressions."""

    name: ClassVar[str] = "clean-up"
    provides: ClassVar[frozenset[str]] = frozenset({"joined views"})

    def apply(self, captured: CapturedModel) -> CapturedModel:
        trained = {name for name, parameter in captured.parameters.items() if parameter.requires_grad}
        simplify(captured.graph, differentiable={n for n in captured.graph.nodes if n.name in trained})
        return captured
