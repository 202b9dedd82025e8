"""Whether a number of a training step can be right, from those of the steps before. Nothing is sent or changed here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 50
"""Steps that a number is compared with."""
ENOUGH = 20
"""Steps before which nothing is taken for a jump."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """what: the loss or the gradient norm. median: of the steps before, if the value is finite and has jumped."""

    what: str
    value: float
    median: float | None = None

    def __str__(self) -> str:
        if self.median is None:
            return f"the {self.what} is {self.value}"
        times = self.value / self.median
        return f"the {self.what} is {self.value:.6g}, {times:.3g} times the median of the steps before"


def anomaly_of(
    numbers: dict[str, float], recent: dict[str, Sequence[float]], max_jump: float | None, *, finite: bool = True
) -> Anomaly | None:
    """What is wrong with the numbers of a step, the first that there is.

    numbers: by what they are. recent: those of the last steps that were made. max_jump: times their median that are a
    jump; None if nothing is. finite: whether numbers that are not finite are wrong; else somebody else sees to them.
    """
    for what, value in numbers.items():
        if not math.isfinite(value):
            if finite:
                return Anomaly(what, value)
            continue
        before = recent.get(what, ())
        if max_jump is not None and len(before) >= ENOUGH:
            median = statistics.median(before)
            if 0 < median * max_jump < value:
                return Anomaly(what, value, median)
    return None
