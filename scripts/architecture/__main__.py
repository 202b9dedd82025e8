"""Draws the pictures of docs/architecture.md, with figures that the compiler computes for them.

python -m scripts.architecture [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from scripts.architecture import one_tensor, search_funnel, stage_memory, types_of_data
from scripts.architecture.svg import Picture

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
PICTURES: dict[str, Callable[[], Picture]] = {
    "types-of-data": types_of_data.draw,
    "one-tensor": one_tensor.draw,
    "search-funnel": search_funnel.draw,
    "stage-memory": stage_memory.draw,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().svg())
