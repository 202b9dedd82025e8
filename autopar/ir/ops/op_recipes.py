"""Which recipe of narrow floats an op of a graph has: its one home is an argument of the op."""

from __future__ import annotations

from typing import cast

from torch import fx

from autopar.ir.ops.composite import moe, scaled_linear
from autopar.ir.ops.scalings import SCALINGS, Recipe, Scaling


def recipe_of(node: fx.Node) -> Recipe | None:
    """The recipe of an op, None if it is not in narrow floats."""
    return cast("Recipe | None", node.kwargs.get("recipe")) if node.target in (scaled_linear, moe) else None


def scaling_of(node: fx.Node) -> Scaling | None:
    """What the recipe of an op says, None of one that has none."""
    recipe = recipe_of(node)
    return None if recipe is None else SCALINGS[recipe]
