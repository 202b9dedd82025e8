"""Recipes of narrow floats: which numbers operands of a product become, and what each of their scales is for.

    fp8-tensor    one scale for a tensor
    fp8-delayed   likewise, that follows from the steps before
    fp8-row       one for each row along the dimension that a product sums
    fp8-block     one for 128 neighbours of a row along that dimension, of a weight for 128 x 128
    mxfp8         one for 32 neighbours, a power of two
    nvfp4         one for 16 neighbours, of a weight for 16 x 16, in 8 bits, and one for the tensor; numbers have 4 bits

By tensor and by row are torchao's tensorwise and rowwise scaling; delayed is Transformer Engine's (``DelayedScaling``:
the largest of the last steps); blocks are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), in backward of what
forward read, not of what it had rounded, as torchao's blockwise training has them. mxfp8 is the OCP microscaling
format, its scales rounded so that nothing is beyond the largest number (arXiv:2506.08027), as Transformer Engine does;
nvfp4 is NVIDIA's (arXiv:2509.25149) without its random rotations and rounding at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, NamedTuple

import torch

Recipe = Literal["fp8-tensor", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4"]


class Format(NamedTuple):
    """Narrow floats. dtype: in which they are kept. limit: the largest of them. bits: that a device moves for each."""

    dtype: torch.dtype
    limit: float
    bits: int


E4M3 = Format(torch.float8_e4m3fn, 448.0, 8)
E5M2 = Format(torch.float8_e5m2, 57344.0, 8)
# 0, 0.5, 1, 1.5, 2, 3, 4 and 6, which 8 bits hold exactly.
E2M1 = Format(torch.float8_e4m3fn, 6.0, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What a recipe says.

    rate: name of the matrix rate that its products run at (``Device.matmul_rate``). value, gradient: what gradients
    become, and what other tensors do. reach: what a scale is for. tile: numbers along the dimension that is summed
    that share one, if it is for a tile; of the last tile there may be fewer. square_weights: a tile of a weight has as
    many rows. power_of_two: scales are rounded down to one. scale_bits: of a scale in memory. two_levels: a tensor has
    one too, by which the inverse scales of its tiles become 8-bit floats. least: magnitude that a scale is computed of.
    steps: before this one, of whose largest magnitude scales follow; 0: of what is at hand.
    """

    rate: str
    value: Format
    gradient: Format
    reach: Literal["tensor", "row", "tile"]
    tile: int = 1
    square_weights: bool = False
    power_of_two: bool = False
    scale_bits: int = 32
    two_levels: bool = False
    least: float = 1e-12
    steps: int = 0

    @property
    def shared(self) -> Literal["tensor", "row"] | None:
        """What a maximum is taken of over the ranks that hold pieces of it; None where no rank needs another's."""
        if self.steps:
            return None
        if self.reach == "tile":
            return "tensor" if self.two_levels else None
        return self.reach

    @property
    def has_one_scale(self) -> bool:
        """Whether a tensor has one, of the tensor at hand, so that its pieces may be quantised apart."""
        return self.reach == "tensor" and not self.steps

    @property
    def multiple(self) -> int:
        """What sizes of a product have to be multiples of: units for such numbers read 16 bytes at once."""
        return 16 * 8 // self.value.bits

    @property
    def multiple_of_parts(self) -> int:
        """What the parts of a dimension on several ranks have to be multiples of, so that they share no tile."""
        return max(self.multiple, self.tile)

    def multiple_of_rows(self, inner: int) -> int:
        """The same of a dimension of rows, before others of ``inner`` rows together."""
        return self.tile // gcd(self.tile, inner)

    @property
    def bytes_of_number(self) -> float:
        """Bytes of a number with its share of the scale."""
        shared = self.tile if self.reach == "tile" else 0
        return self.value.bits / 8 + (self.scale_bits / 8 / shared if shared else 0.0)


SCALINGS: dict[Recipe, Scaling] = {
    "fp8-tensor": Scaling(rate="fp8", value=E4M3, gradient=E5M2, reach="tensor"),
    # As many steps as Transformer Engine goes back (recalled: the default of amax_history_len).
    "fp8-delayed": Scaling(rate="fp8", value=E4M3, gradient=E5M2, reach="tensor", steps=1024),
    "fp8-row": Scaling(rate="fp8", value=E4M3, gradient=E4M3, reach="row", power_of_two=True),
    "fp8-block": Scaling(rate="fp8-block", value=E4M3, gradient=E4M3, reach="tile", tile=128, square_weights=True),
    # A power of two in 8 bits without a sign is 2^-127 to 2^127 (e8m0).
    "mxfp8": Scaling(
        rate="mxfp8",
        value=E4M3,
        gradient=E4M3,
        reach="tile",
        tile=32,
        power_of_two=True,
        scale_bits=8,
        least=E4M3.limit * 2.0**-127,
    ),
    "nvfp4": Scaling(
        rate="nvfp4",
        value=E2M1,
        gradient=E2M1,
        reach="tile",
        tile=16,
        square_weights=True,
        scale_bits=8,
        two_levels=True,
    ),
}

# The matrix rates that recipes name.
RATES = tuple(dict.fromkeys(scaling.rate for scaling in SCALINGS.values()))


def multiples_of(recipe: Recipe, rows: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """What local parts of the factors of a linear layer have to be multiples of, none if any will do.

    rows: factors of its rows with their sizes, major first.
    """
    scaling = SCALINGS[recipe]
    found = {"k": scaling.multiple_of_parts, "n": scaling.multiple_of_parts}
    for number, (factor, _) in enumerate(rows):
        found[factor] = scaling.multiple_of_rows(prod(size for _, size in rows[number + 1 :]))
    return {factor: multiple for factor, multiple in found.items() if multiple > 1}
