"""Schedules equal torch's, never deadlock, and take the time that closed forms say."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from autopar.cost_model.simulator import (
    Action,
    action_order,
    bubble_fraction,
    live_microbatches,
    pipeline_time,
    run_actions,
    simulate,
)
from autopar.ir.errors import InvalidPlan

SCHEDULES = ("gpipe", "1f1b")
schedules = st.sampled_from(SCHEDULES)


def text(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> str:
    return " ".join(map(str, action_order(schedule, stage, num_stages, num_microbatches)))


def test_action_text_parses_back() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("12B31") == Action(12, "B", 31)
    with pytest.raises(InvalidPlan, match="'2X0' is not a pipeline action"):
        Action.parse("2X0")


def test_golden_1f1b() -> None:
    assert text("1f1b", 0, 3, 4) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text("1f1b", 1, 3, 4) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert text("1f1b", 2, 3, 4) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_golden_gpipe() -> None:
    assert text("gpipe", 1, 2, 3) == "1F0 1F1 1F2 1B0 1B1 1B2"


@given(schedules, st.integers(1, 5), st.integers(0, 5))
def test_orders_equal_torch(schedule: str, num_stages: int, more: int) -> None:
    """Forwards and backwards alternate as in torch's own orders, less the waits and gradient reductions in them.

    Microbatch numbers are left out: torch's printed 1F1B order starts the last stage at microbatch 1.
    """

    num_microbatches = num_stages + more
    bare = object.__new__({"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule])
    bare._num_stages, bare._n_microbatches = num_stages, num_microbatches
    orders = bare._get_pipeline_order()
    assert orders is not None
    for stage, order in orders.items():
        theirs = [found[1] for action in order if (found := re.fullmatch(r"\d+([FB])\d+", str(action)))]
        ours = [action.direction for action in action_order(schedule, stage, num_stages, num_microbatches)]
        assert theirs == ours


def test_unknown_schedule() -> None:
    with pytest.raises(InvalidPlan, match="unknown schedule 'zb'; known: gpipe, 1f1b"):
        action_order("zb", 0, 2, 4)


@given(schedules, st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_equal_stages_take_the_closed_form_and_the_known_bubble(
    schedule: str, num_stages: int, count: int, forward_s: float, backward_s: float
) -> None:
    timeline = simulate(schedule, [forward_s] * num_stages, [backward_s] * num_stages, count)
    closed = pipeline_time(schedule, [forward_s] * num_stages, [backward_s] * num_stages, count)
    assert timeline.step_time_s == pytest.approx(closed)
    assert timeline.step_time_s == pytest.approx((count + num_stages - 1) * (forward_s + backward_s))
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction(num_stages, count), abs=1e-9)


stage_seconds = st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=1, max_size=5)


@given(schedules, stage_seconds, st.integers(1, 8), st.floats(0, 2))
def test_uneven_stages_run_without_deadlock(
    schedule: str, stages: list[tuple[float, float]], count: int, p2p_s: float
) -> None:
    forward_s, backward_s = zip(*stages, strict=True)
    timeline = simulate(schedule, forward_s, backward_s, count, p2p_forward_s=p2p_s)
    busiest = max(range(len(stages)), key=lambda i: forward_s[i] + backward_s[i])
    around = sum(f + b for f, b in stages[:busiest])
    bound = around + count * (forward_s[busiest] + backward_s[busiest])
    assert timeline.step_time_s >= bound - 1e-9
    for stage, events in enumerate(timeline.events):
        assert len(events) == 2 * count
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(events))
        assert timeline.peak_live[stage] == live_microbatches(schedule, stage, len(stages), count)


@given(stage_seconds, st.integers(1, 8), st.floats(0, 2))
def test_gpipe_closed_form_is_exact(stages: list[tuple[float, float]], count: int, p2p_s: float) -> None:
    forward_s, backward_s = zip(*stages, strict=True)
    timeline = simulate("gpipe", forward_s, backward_s, count, p2p_forward_s=p2p_s)
    assert timeline.step_time_s == pytest.approx(pipeline_time("gpipe", forward_s, backward_s, count, p2p_s=p2p_s))


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4), st.floats(0.1, 5))
def test_a_slower_stage_never_makes_a_step_faster(num_stages: int, count: int, which: int, more: float) -> None:
    forward_s, backward_s = [1.0] * num_stages, [2.0] * num_stages
    before = simulate("1f1b", forward_s, backward_s, count).step_time_s
    forward_s[which % num_stages] += more
    assert simulate("1f1b", forward_s, backward_s, count).step_time_s >= before


def test_in_flight_microbatches() -> None:
    assert [live_microbatches("1f1b", i, 4, 8) for i in range(4)] == [4, 3, 2, 1]
    assert [live_microbatches("1f1b", i, 4, 2) for i in range(4)] == [2, 2, 2, 1]
    assert [live_microbatches("gpipe", i, 4, 8) for i in range(4)] == [8, 8, 8, 8]


def test_deadlock_shows_where_every_stage_stands() -> None:
    orders = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(InvalidPlan, match="deadlocks:\n  stage 0: >0B0< 0F0\n  stage 1: >1F0< 1B0"):
        run_actions(orders, [1, 1], [1, 1], [0], [0])
