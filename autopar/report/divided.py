"""How much of its work each mesh axis for tensors or experts divides, in words and as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autopar.search.problem.constraints import role_of_axis
from autopar.units import of_flop

if TYPE_CHECKING:
    from autopar.search.divided_share import DividedFlops

# Ops that are named of those that every rank of an axis repeats.
_MOST = 3


def divided_words(found: DividedFlops) -> str:
    """``tp 2 divides 12 of 38 GFLOP; whole on every rank: ...``: how much of its work an axis divides, and what not."""
    of_experts = " of its experts" if role_of_axis(found.axis) == "ep" else ""
    words = f"{found.axis} {found.size} divides {of_flop(found.divided, found.total)}{of_experts}"
    if not found.whole:
        return words
    more = len(found.whole) - _MOST
    named = ", ".join(map(str, found.whole[:_MOST]))
    return f"{words}; whole on every rank: {named}" + (f" and {more} more" if more > 0 else "")


def divided_data(every: Iterable[DividedFlops]) -> dict[str, Any]:
    """By axis. ``divided_flops``, ``total_flops``: of a step's products, all ranks together. ``whole``: not divided."""
    return {
        found.axis: {
            "divided_flops": found.divided,
            "total_flops": found.total,
            "share": found.share,
            "words": divided_words(found),
            "whole": [
                {"op": op.name, "repeats": op.repeats, "flops": op.flops, "reason": op.reason} for op in found.whole
            ],
        }
        for found in every
    }
