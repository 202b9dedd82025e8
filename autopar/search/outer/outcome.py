"""What came of trying a leaf of the outer search."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """step_time_s: of its best plan, None if it was passed over or none was found. least_s: seconds that it takes at
    least, proved or likely; inf if nothing fits."""

    step_time_s: float | None
    least_s: float
