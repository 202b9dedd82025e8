"""The outcome of trying a configuration of the outer search."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """step_time_s: of the best plan of a configuration, None if it was pruned or nothing fits. least_s: bound or
    estimate of its seconds; inf if nothing fits."""

    step_time_s: float | None
    least_s: float
