"""Precisions of compute. Parameters, their gradients' sums and optimiser state are float32 under all of them.

bf16              all ops in bfloat16
fp8-row           likewise, but for the matrix products that 8-bit floats serve (``analysis.eight_bits``)
fp32+fp8-row      these products in 8-bit floats, and the rest in float32
bf16,fp8-row      either, whichever is faster
"""

from __future__ import annotations

from typing import get_args

import torch

from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Precision, Recipe

# Of the other ops, where a recipe alone is named.
_BESIDE_RECIPES: Precision = "bf16"

_NARROW: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def narrow_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype that float32 parameters and activations are computed in; None for that of the model."""
    return _NARROW.get(precision)


def compute_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """What an element is computed in that the capture has as ``dtype``: float32 becomes the precision of compute."""
    return _NARROW.get(precision, dtype) if dtype == torch.float32 else dtype


def itemsize_of(dtype: torch.dtype, precision: str) -> int:
    """Bytes of an element that the capture has as ``dtype``, in compute."""
    return compute_dtype(dtype, precision).itemsize


def parse_precision(text: str) -> tuple[Precision, tuple[Recipe | None, ...]]:
    """The precision that is asked for, and the recipes to choose from for its matrix products; None: in that precision.

    Raises InvalidInput for a name that there is not, or a choice between precisions.
    """
    precisions: dict[Precision, None] = {}
    recipes: dict[Recipe | None, None] = {}
    for name in text.split(","):
        precision, recipe = _parse_one(name.strip(), text)
        precisions[precision] = recipes[recipe] = None
    if len(precisions) > 1:
        raise InvalidInput(
            f"precision {text!r}: a search chooses for matrix products alone, and these differ in all other ops "
            f"({', '.join(precisions)}).\n  try: bf16,fp8-row, or a search for each"
        )
    return next(iter(precisions)), tuple(recipes)


def _parse_one(name: str, text: str) -> tuple[Precision, Recipe | None]:
    first, plus, second = name.partition("+")
    precision, recipe = (first, second) if plus else (first, None) if first in get_args(Precision) else ("", first)
    for known in get_args(Precision):
        if known == (precision or _BESIDE_RECIPES):
            if recipe is None:
                return known, None
            for own in get_args(Recipe):
                if own == recipe:
                    return known, own
    raise InvalidInput(
        f"precision {text!r}: there is no {name!r}.\n  expected: {', '.join(get_args(Precision))}, "
        f"{', '.join(get_args(Recipe))} (the other ops in {_BESIDE_RECIPES}), both joined (fp32+fp8-row), or several "
        "to choose from (bf16,fp8-row)"
    )
