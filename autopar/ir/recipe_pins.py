"""Recipes of narrow floats that the user fixes for linear layers, by the names of their weights.

    autopar search gpt --precision bf16,fp8-row --recipe '*.down.weight: bf16' --recipe 'head.weight: fp8-row'
    autopar.search(model, 8, precision="bf16,fp8-row", recipe_pins={"*.down.weight": "bf16"})

A pin goes before the rule that finds layers (``ir.analysis.eight_bits``) and before the choice of a search; of several
that match one layer, the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

from autopar.ir.errors import InvalidInput
from autopar.ir.ops.scalings import Recipe
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePin:
    """What linear layers are computed in whose weight's name matches ``pattern`` (``*`` and ``?`` as in file names).

    recipe: None: as the other ops, in ``precision``.
    """

    pattern: str
    recipe: Recipe | None
    precision: Precision | None = None

    def matches(self, names: Iterable[str]) -> bool:
        """Whether the pattern matches any of these names of a weight."""
        return any(fnmatchcase(name, self.pattern) for name in names)

    def __str__(self) -> str:
        return f"{self.pattern}: {self.recipe or self.precision}"


def pins_of(given: Mapping[str, str] | Iterable[RecipePin]) -> tuple[RecipePin, ...]:
    """Pins from patterns and what they are for, or as they are. Raises InvalidInput for a recipe that there is not."""
    if isinstance(given, Mapping):
        return tuple(_pin(pattern, said) for pattern, said in given.items())
    return tuple(given)


def parse_pin(text: str) -> RecipePin:
    """``*.down.weight: bf16``. Raises InvalidInput."""
    pattern, colon, said = text.rpartition(":")
    if not colon:
        raise InvalidInput(f"{text!r} says no recipe.\n  expected: PATTERN: RECIPE, as in '*.down.weight: bf16'")
    return _pin(pattern.strip(), said.strip())


def _pin(pattern: str, said: str) -> RecipePin:
    for recipe in get_args(Recipe):
        if recipe == said:
            return RecipePin(pattern=pattern, recipe=recipe)
    for precision in get_args(Precision):
        if precision == said:
            return RecipePin(pattern=pattern, recipe=None, precision=precision)
    known = ", ".join((*get_args(Recipe), *get_args(Precision)))
    raise InvalidInput(f"recipe of {pattern!r}: there is no {said!r}.\n  expected: {known}")
