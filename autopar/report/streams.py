"""One predicted step, stream by stream, packed for the page: the spans of each rank of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from autopar.cost_model.memory.model_state import MemoryParts
from autopar.cost_model.schedule.pipeline_simulator import Timeline
from autopar.cost_model.schedule.stream_simulator import COMPUTE, Span
from autopar.report.study import Study
from autopar.search.predict.step_tasks import GATHER, REDUCE, SEND, pass_ends

# Up to so many spans are shown block by block; of more, those of a pass are one.
_MOST_SPANS = 4000

# Times are whole numbers of this share of the step.
_TICKS = 1_000_000

# Letter of a span that is no pass of a microbatch.
_LETTERS = {GATHER: "G", REDUCE: "R", SEND: "S"}
_OPTIMISER = "O"


class Drawn(NamedTuple):
    """A bar. lane: 0 compute, 1 communication beside it. kind: a pass (F, B, I, W), O optimiser, G, R or S."""

    lane: int
    kind: str
    label: str
    start_s: float
    end_s: float


def steps_of_streams(study: Study) -> dict[str, Any]:
    """The step with all its streams."""
    spans = [span for span in study.predicted.spans if span.end_s > span.start_s]
    whole = len(spans) > _MOST_SPANS
    ranks: list[list[Drawn]] = [[] for _ in range(study.plan.num_pipeline_ranks)]
    for span in spans:
        _append(ranks[span.rank], _drawn(span, whole=whole))
    return _packed(ranks, study.predicted.overlapped_s, study.predicted.timeline.bubble_fraction)


def steps_of_passes(timeline: Timeline) -> dict[str, Any]:
    """The passes alone, as a plan's prediction gives them."""
    ranks = [
        [Drawn(0, event.action.kind, str(event.action), event.start_s, event.end_s) for event in events]
        for events in timeline.events
    ]
    return _packed(ranks, timeline.step_time_s, timeline.bubble_fraction)


def hidden_s(study: Study) -> dict[str, float]:
    """Seconds of communication of the busiest rank that run beside its compute, by stream."""
    by_rank: dict[int, list[Span]] = {}
    for span in study.predicted.spans:
        by_rank.setdefault(span.rank, []).append(span)

    def busy(rank: int) -> float:
        return sum(span.end_s - span.start_s for span in by_rank[rank] if span.stream == COMPUTE)

    mine = by_rank[max(by_rank, key=busy)]
    computing = sorted((s.start_s, s.end_s) for s in mine if s.stream == COMPUTE)
    found: dict[str, float] = {}
    for stream in _LETTERS:
        beside = _overlap(sorted((s.start_s, s.end_s) for s in mine if s.stream == stream), computing)
        if beside:
            found[stream] = beside
    return found


def memory_over_step(study: Study) -> list[dict[str, Any]]:
    """Memory profile of every rank of the pipeline: when each pass ends, and the bytes held then, by kind."""
    predicted, found = study.predicted, []
    ends = pass_ends(predicted.spans)
    names = list(MemoryParts().as_bytes())
    for rank in range(study.plan.num_pipeline_ranks):
        memory_profile = predicted.memory_profile(rank)
        held = [parts.as_bytes() for _, parts in memory_profile]
        found.append(
            {
                "ticks": [_ticks(ends[rank, str(action)], predicted.overlapped_s) for action, _ in memory_profile],
                "passes": [str(action) for action, _ in memory_profile],
                "mib": {name: [round(one[name] / 2**20) for one in held] for name in names},
            }
        )
    return found


def _drawn(span: Span, *, whole: bool) -> Drawn:
    action = span.name.partition(" ")[0]
    if span.stream == COMPUTE:
        if span.name == "optimiser":
            return Drawn(0, _OPTIMISER, span.name, span.start_s, span.end_s)
        return Drawn(0, _kind(action), action if whole else span.name, span.start_s, span.end_s)
    label = action if whole and span.stream != SEND else span.name
    return Drawn(1, _LETTERS[span.stream], label, span.start_s, span.end_s)


def _kind(action: str) -> str:
    return next(letter for letter in action if letter.isalpha())


def _append(bars: list[Drawn], bar: Drawn) -> None:
    """Add a bar; to the last one of its lane if both are parts of the same."""
    for number in range(len(bars) - 1, max(-1, len(bars) - 4), -1):
        last = bars[number]
        if last.lane == bar.lane:
            if (last.kind, last.label) == (bar.kind, bar.label):
                bars[number] = last._replace(end_s=bar.end_s)
                return
            break
    bars.append(bar)


def _packed(ranks: Sequence[Iterable[Drawn]], step_s: float, bubble: float) -> dict[str, Any]:
    """By columns, so that it is small once compressed. Starts and ends are shares of the step, in millionths."""
    rows = []
    for bars in ranks:
        bars = list(bars)
        rows.append(
            {
                "lanes": "".join(str(bar.lane) for bar in bars),
                "kinds": "".join(bar.kind for bar in bars),
                "labels": [bar.label for bar in bars],
                "starts": [_ticks(bar.start_s, step_s) for bar in bars],
                "ends": [_ticks(bar.end_s, step_s) for bar in bars],
            }
        )
    return {"step_time_s": step_s, "bubble_fraction": bubble, "ranks": rows}


def _ticks(seconds: float, step_s: float) -> int:
    return round(_TICKS * seconds / step_s) if step_s else 0


def _overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Length of what two rows of intervals, each in order and without overlap, have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
