"""Dividing a stretch of a stream that does not repeat into units that a pipeline may be cut between.

Every unit holds at least one heavy op. Between two consecutive heavy ops lies a gap, whose best cut is the
one that the fewest tensors cross. A stretch is cut in those gaps that are narrower than their surroundings:

    conv1   conv2   conv3   downsample   |  conv1 ...
         2       2       2               1              only the last gap is cut: the others pass inside a branch

so that residual branches stay whole, and a plain chain is cut everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.ir.analysis.cut_costs import Liveness


def divide(live: Liveness, heavy: Sequence[bool], start: int, end: int) -> list[int]:
    """Positions strictly between ``start`` and ``end`` at which to cut, in order."""
    profile = live.profile()
    places = [at for at in range(start, end) if heavy[at]]
    gaps: list[tuple[int, int]] = []
    for before, after in pairwise(places):
        cuts = [cut for cut in range(before + 1, after + 1) if live.allowed(cut)]
        if not cuts:
            break
        best = min(cuts, key=lambda cut: (*profile[cut], live.depths[cut], -cut))
        gaps.append((profile[best][0], best))
    edge_before = [profile[start][0]] if start > 0 else []
    edge_after = [profile[end][0]] if end < live.length else []
    counts = [*edge_before, *(count for count, _ in gaps), *edge_after]
    offset = len(edge_before)
    return [cut for number, (_, cut) in enumerate(gaps) if _is_basin(counts, number + offset)]


def _is_basin(counts: Sequence[int], at: int) -> bool:
    """Whether ``counts`` rises (or ends) on both sides of the level stretch around ``at``."""
    for step in (-1, 1):
        other = at
        while 0 <= other < len(counts) and counts[other] == counts[at]:
            other += step
        if 0 <= other < len(counts) and counts[other] < counts[at]:
            return False
    return True
