"""Fraction of its best rate that a matrix product of some shape reaches.

The result is cut into tiles. Each unit of the device (a streaming multiprocessor, a core) computes one at a time, in
steps along the depth of the product, which the library may cut into ``s`` pieces to have more tiles:

    fill    rows / (r ceil(rows / r)) * columns / (c ceil(columns / c))       the outermost tiles are partly empty
    waves   n / (units ceil(n / units)), n = s repeats tiles                   so is the last round of them
    depth   (k / s) / (k / s + half_depth)                                     a tile is set up and written out

The product of the three, for the tile and the cut that suit best. Small tiles fill better and read more: their rate is
less. See NVIDIA, Matrix Multiplication Background User's Guide, on tile and wave quantisation (recalled).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

# Pieces that the depth of a product may be cut into (split-K). Chosen.
_CUTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the result that one unit computes at a time. rate: relative to the largest tile."""

    rows: int
    columns: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a device divides matrix products.

    units: that compute tiles side by side. half_depth: depth of a product at which half of the rate is reached.
    """

    tiles: tuple[Tile, ...]
    units: int
    half_depth: float


@lru_cache(maxsize=1 << 16)
def fraction_of_rate(tiling: Tiling, rows: float, columns: float, depth: float, repeats: float = 1.0) -> float:
    """For ``repeats`` independent products of ``rows x depth`` with ``depth x columns``. In (0, 1]."""
    best = 0.0
    for tile in tiling.tiles:
        down, across = ceil(rows / tile.rows), ceil(columns / tile.columns)
        fill = tile.rate * rows / (tile.rows * down) * columns / (tile.columns * across)
        for cut in _CUTS:
            number = ceil(cut * repeats * down * across)
            waves = number / (tiling.units * ceil(number / tiling.units))
            best = max(best, fill * waves * depth / (depth + cut * tiling.half_depth))
    return best
