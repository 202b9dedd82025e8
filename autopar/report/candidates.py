"""The plans that the search looked at: seconds of a step against memory, which of them no other beats at both."""

from __future__ import annotations

from typing import Any

from autopar.report.words import line_of, one_line
from autopar.search.outer.configuration import Candidate
from autopar.search.predict.to_plan import name_axes
from autopar.search.result import SearchResult


def candidates(result: SearchResult) -> list[dict[str, Any]]:
    """Every one, the fastest first; ``baseline`` is the name of the baseline that it is, ``front`` whether no other is
    both faster and smaller, ``chosen`` whether it became the plan."""
    prediction = result.predicted
    names = {(one.configuration, one.step_time_s): one.name for one in result.baselines if not one.at_least}
    found: list[dict[str, Any]] = [
        {
            "kind": tried.configuration.kind,
            "words": _words(tried),
            "step_time_s": tried.predicted.step_time_s,
            "peak_bytes": round(tried.predicted.peak_bytes),
            "baseline": names.get((str(tried.configuration), tried.step_time_s)),
            "chosen": False,
        }
        for tried in result.candidates
        # The plan itself comes last.
        if (tried.predicted.step_time_s, tried.predicted.peak_bytes) != (prediction.step_time_s, prediction.peak_bytes)
    ]
    found.append(
        {
            "kind": "",
            "words": one_line(result.plan),
            "step_time_s": prediction.step_time_s,
            "peak_bytes": round(prediction.peak_bytes),
            "baseline": None,
            "chosen": True,
        }
    )
    found.sort(key=lambda one: (one["step_time_s"], one["peak_bytes"]))
    least = float("inf")
    for one in found:
        one["front"] = one["peak_bytes"] < least
        least = min(least, one["peak_bytes"])
    return found


def _words(one: Candidate) -> str:
    mesh = {axis.name: axis.size for axis in name_axes(one.pricing.workload, one.pricing.mesh, one.assignment).axes}
    own = one.configuration
    line = line_of(own.num_stages, mesh, own.zero, own.num_microbatches, own.schedule)
    return line + (", with rematerialisation" if one.is_rematerialised else "")
