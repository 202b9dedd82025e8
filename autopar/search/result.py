"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.search.predict import Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found.

    predicted: its prediction in full (``plan.prediction`` is the part that the file keeps). optimality_gap: at
    most this share of ``predicted.step_time_s`` could be saved by another plan of the search space, as far as
    lower bounds prove. num_configurations: configurations whose inner problem was solved; num_skipped: those
    that a bound excluded.
    """

    plan: Plan
    predicted: Predicted
    optimality_gap: float
    num_configurations: int
    num_skipped: int
    search_time_s: float
