"""Which regions of rows are computed in tiles, and how many rows a tile has. ``runtime/tiled.py`` computes them."""

from __future__ import annotations

# Numbers that a region makes on one rank which are there at once in a tile, and from how many on there are tiles: 1 and
# 2 GiB in bfloat16. Gradients of weights pass through memory once more for each tile: the larger, the less of that.
TILE = 1 << 29
LIMIT = 1 << 30


def rows_at_once(rows: float, width: float) -> int | None:
    """Rows of a tile, if a rank's ``rows`` rows, for each of which a region makes ``width`` numbers, are in tiles."""
    return max(int(TILE // width), 1) if rows * width > LIMIT else None
