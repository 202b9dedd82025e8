"""Tasks on streams: order, waiting, contention, and no task lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.schedule.critical_path import critical_path
from autopar.cost_model.schedule.stream_simulator import COMPUTE, Span, Streams
from autopar.ir.errors import InvalidPlan

SLOWEST = 0.8


def run(streams: Streams) -> dict[str, Span]:
    return {span.name: span for span in streams.run()}


def test_a_stream_is_in_order_and_others_are_waited_for() -> None:
    streams = Streams()
    a = streams.add(0, COMPUTE, "a", 2.0)
    gathered = streams.add(1, "gather", "gathered", 3.0, [a])
    streams.add(1, COMPUTE, "first", 1.0, [gathered])
    streams.add(1, COMPUTE, "second", 1.0)
    found = run(streams)
    assert found["gathered"][3:5] == (2.0, 5.0)
    # The second waits for nothing but the first, which is before it in the stream.
    assert found["first"].end_s == 6.0 and found["second"].end_s == 7.0


def test_communications_share_the_network() -> None:
    streams = Streams()
    streams.add(0, "gather", "short", 1.0)
    streams.add(0, "reduce", "long", 3.0)
    streams.add(1, "reduce", "elsewhere", 3.0)
    found = run(streams)
    # Both at half the speed for 2 s; then the long one has 2 s of work left, alone.
    assert found["short"].end_s == pytest.approx(2.0)
    assert found["long"].end_s == pytest.approx(4.0)
    assert found["elsewhere"].end_s == 3.0


def test_compute_is_slower_beside_communication() -> None:
    streams = Streams()
    streams.add(0, COMPUTE, "beside", 4.0)
    streams.add(0, "gather", "gather", 1.0, slowdown=0.7)
    found = run(streams)
    assert found["gather"].end_s == 1.0
    assert found["beside"].end_s == pytest.approx(1.0 + 4.0 - 1.0 / 1.7)


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    streams = Streams()
    later = streams.reserve()
    streams.add(0, COMPUTE, "receives", 1.0, [later])
    streams.add(0, COMPUTE, "sends", 1.0, number=later)
    with pytest.raises(InvalidPlan, match="receives on rank 0 waits"):
        streams.run()


@st.composite
def programs(draw: st.DrawFn) -> Streams:
    streams = Streams()
    added: list[int] = []
    for number in range(draw(st.integers(1, 30))):
        after = draw(st.lists(st.sampled_from(added), max_size=3)) if added else []
        stream = draw(st.sampled_from([COMPUTE, "gather", "reduce"]))
        seconds = draw(st.floats(0, 3))
        slowdown = 0.0 if stream == COMPUTE else draw(st.floats(0, SLOWEST))
        added.append(streams.add(draw(st.integers(0, 2)), stream, str(number), seconds, after, slowdown=slowdown))
    return streams


@given(programs())
def test_every_task_runs_once_and_never_faster_than_alone(streams: Streams) -> None:
    spans = streams.run()
    assert len({span.name for span in spans}) == len(spans) == len(streams._tasks)
    assert [span.end_s for span in spans] == sorted(span.end_s for span in spans)
    work = sum(span.work_s for span in spans)
    for span in spans:
        assert span.end_s - span.start_s >= span.work_s - 1e-9
    # Something runs all the time, at worst all communication of one rank one after another beside slowed compute.
    assert spans[-1].end_s <= work * (1 + SLOWEST) + 1e-9
    # What the step waits for leaves no gap, and is the longest that there is.
    path = critical_path(spans)
    assert all(other.start_s - one.end_s <= 1e-9 and one.task in other.after for one, other in pairwise(path))
    assert sum(span.duration_s for span in path) == pytest.approx(spans[-1].end_s, abs=1e-9)
    lengths: dict[int, float] = {}
    for span in spans:
        lengths[span.task] = max((lengths[before] for before in span.after), default=0.0) + span.duration_s
    assert sum(span.duration_s for span in path) == pytest.approx(max(lengths.values()), abs=1e-9)
    ends: dict[tuple[int, str], float] = {}
    for span in sorted(spans, key=lambda own: (own.start_s, int(own.name))):
        assert span.start_s >= ends.get((span.rank, span.stream), 0.0) - 1e-9
        ends[span.rank, span.stream] = span.end_s
