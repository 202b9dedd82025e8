"""Simulated steps never deadlock, and take the time that closed forms say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.schedule.pipeline_simulator import bubble_fraction, pipeline_time, run_actions, simulate
from autopar.ir.errors import InvalidPlan
from autopar.ir.schedule import SCHEDULES, Action, Pipelining, Schedule


def shapes(*names: Schedule) -> st.SearchStrategy[Pipelining]:
    made = st.builds(
        Pipelining, st.sampled_from(names or SCHEDULES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4)
    )
    return made.filter(lambda shape: shape.obstacle() is None)


seconds = st.floats(0.1, 5)


@given(shapes("gpipe", "1f1b"), seconds, seconds)
def test_equal_stages_take_the_closed_form_and_the_known_bubble(shape: Pipelining, forward: float, back: float) -> None:
    stages, count = shape.num_stages, shape.num_microbatches
    timeline = simulate(shape, [forward] * stages, [back] * stages)
    assert timeline.step_time_s == pytest.approx(pipeline_time(shape, [forward + back] * stages))
    assert timeline.step_time_s == pytest.approx((count + stages - 1) * (forward + back))
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction(stages, count), abs=1e-9)


@given(shapes("naive"), seconds, seconds)
def test_naive_runs_one_stage_at_a_time(shape: Pipelining, forward: float, back: float) -> None:
    stages = shape.num_stages
    timeline = simulate(shape, [forward] * stages, [back] * stages)
    assert timeline.step_time_s == pytest.approx(pipeline_time(shape, [forward + back] * stages))
    assert timeline.bubble_fraction == pytest.approx(1 - 1 / stages, abs=1e-9)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), seconds, seconds)
def test_virtual_stages_divide_the_bubble(ranks: int, rounds: int, virtual: int, forward: float, back: float) -> None:
    shape = Pipelining("interleaved", ranks, rounds * ranks, virtual)
    stages = shape.num_stages
    timeline = simulate(shape, [forward / virtual] * stages, [back / virtual] * stages)
    plain = simulate(Pipelining("1f1b", ranks, rounds * ranks), [forward] * ranks, [back] * ranks)
    busy = rounds * ranks * (forward + back)
    assert timeline.step_time_s - busy == pytest.approx((plain.step_time_s - busy) / virtual)
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction(ranks, rounds * ranks, virtual))
    assert timeline.step_time_s == pytest.approx(pipeline_time(shape, [(forward + back) / virtual] * stages))


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("zb-h1", 1), ("zb-h1", 2), ("zb-2p", 1), ("zb-v", 2), ("dualpipe-v", 2)]
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_waits_less_than_half_as_long_as_1f1b(schedule: Schedule, virtual: int, ranks: int) -> None:
    """With equal seconds for forward, inputs and weights."""
    for count in (2 * ranks, 4 * ranks):
        shape = Pipelining(schedule, ranks, count, virtual)
        stages = shape.num_stages
        timeline = simulate(shape, [1 / virtual] * stages, [2 / virtual] * stages)
        plain = simulate(Pipelining("1f1b", ranks, count), [1.0] * ranks, [2.0] * ranks)
        assert timeline.bubble_fraction < plain.bubble_fraction / 2
        assert timeline.step_time_s - 3 * count == pytest.approx((ranks - 1) / virtual)
        assert timeline.step_time_s == pytest.approx(pipeline_time(shape, [3 / virtual] * stages))


def idle_s(shape: Pipelining, passes: tuple[float, float, float], send_s: float = 0.0) -> tuple[float, float]:
    """Most seconds that a rank waits in a step, and between its own first and last pass, of equal stages.

    passes: seconds forward, to the inputs, to the weights. The first stage sends no gradient.
    """
    forward, inputs, weights = passes
    later = shape.num_stages - 1
    split = [0.0, *[inputs] * later], [inputs + weights, *[weights] * later]
    stages = shape.num_stages
    timeline = simulate(shape, [forward] * stages, [inputs + weights] * stages, split, p2p_forward_s=send_s)
    own = [rank[-1].end_s - rank[0].start_s - busy for rank, busy in zip(timeline.events, timeline.busy_s, strict=True)]
    return timeline.step_time_s - min(timeline.busy_s), max(own)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_no_rank_is_idle_from_its_first_to_its_last_pass_under_zb_2p(ranks: int, rounds: int) -> None:
    """With equal passes. The step still waits for the last rank, which begins P - 1 forwards after the first."""
    count = rounds * ranks
    in_step, between = idle_s(Pipelining("zb-2p", ranks, count), (1.0, 1.0, 1.0))
    assert between == pytest.approx(0.0) and in_step == pytest.approx(ranks - 1)
    in_step, between = idle_s(Pipelining("zb-h1", ranks, count), (1.0, 1.0, 1.0))
    assert between == pytest.approx(ranks - 1) and in_step == pytest.approx(ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
@pytest.mark.parametrize("passes", [(1.0, 1.2, 0.8), (1.0, 1.4, 0.6), (1.0, 1.0, 0.5), (1.0, 0.9, 1.1)])
@pytest.mark.parametrize("send_s", [0.0, 0.2])
def test_zb_2p_waits_no_longer_than_zb_h1(
    ranks: int, rounds: int, passes: tuple[float, float, float], send_s: float
) -> None:
    """Shorter by a fifth at least where weight gradients are the shorter part or sends take time."""
    two, one = (
        idle_s(Pipelining(name, ranks, rounds * ranks), passes, send_s)  # type: ignore[arg-type]
        for name in ("zb-2p", "zb-h1")
    )
    assert two[0] <= one[0] + 1e-9 and two[1] < one[1]
    if send_s or passes[1] > passes[2] + 0.3:
        assert two[0] < 0.8 * one[0]


@given(shapes(), st.lists(st.tuples(seconds, seconds, st.floats(0, 1)), min_size=24, max_size=24), st.floats(0, 2))
def test_every_schedule_runs_without_deadlock(
    shape: Pipelining, stages: list[tuple[float, float, float]], p2p_s: float
) -> None:
    forward_s, backward_s, share = zip(*stages[: shape.num_stages], strict=True)
    weights_s = [b * w for b, w in zip(backward_s, share, strict=True)]
    inputs_s = [b - w for b, w in zip(backward_s, weights_s, strict=True)]
    timeline = simulate(shape, forward_s, backward_s, (inputs_s, weights_s), p2p_forward_s=p2p_s)
    for rank, events in enumerate(timeline.events):
        assert tuple(event.action for event in events) == shape.orders()[rank]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(events))
        busy = shape.num_microbatches * sum(forward_s[s] + backward_s[s] for s in shape.stages_of(rank))
        assert timeline.busy_s[rank] == pytest.approx(busy)
        assert timeline.step_time_s >= busy + sum(forward_s[:rank]) - 1e-9
    ends = {event.action: event.end_s for events in timeline.events for event in events}
    starts = {event.action: event.start_s for events in timeline.events for event in events}
    for (stage, kind, microbatch), start in starts.items():
        if kind == "F" and stage:
            sends = shape.rank_of(stage) != shape.rank_of(stage - 1)
            assert start >= ends[Action(stage - 1, "F", microbatch)] + sends * p2p_s - 1e-9
        if kind == "W":
            assert start >= ends[Action(stage, "I", microbatch)]
        if kind in "BI" and stage + 1 < shape.num_stages:
            above = [a for k in "BI" if (a := Action(stage + 1, k, microbatch)) in ends]  # type: ignore[arg-type]
            sends = shape.rank_of(stage) != shape.rank_of(stage + 1)
            assert len(above) == 1 and start >= ends[above[0]] + sends * p2p_s - 1e-9


def test_what_a_rank_sends_to_another_goes_one_after_the_other() -> None:
    """Three forwards of 1 s whose results take 4 s to send: the link is never idle, and then come the gradients."""
    timeline = simulate(Pipelining("gpipe", 2, 3), [1.0, 1.0], [1.0, 1.0], p2p_forward_s=4.0, p2p_backward_s=0.0)
    assert [event.start_s for event in timeline.events[1]] == [5.0, 9.0, 13.0, 14.0, 15.0, 16.0]
    assert timeline.step_time_s == 18.0


def test_virtual_stages_share_the_links_between_their_ranks() -> None:
    """Both directions carry forwards and gradients there, but no direction waits for the other."""
    shape = Pipelining("interleaved", 2, 2, 2)
    timeline = simulate(shape, [1.0] * 4, [1.0] * 4, p2p_forward_s=10.0)
    ends = {event.action: event.end_s for events in timeline.events for event in events}
    starts = {event.action: event.start_s for events in timeline.events for event in events}
    # Rank 0 sends the second microbatch of stage 0 while rank 1 sends the first of stage 1 back to it.
    assert starts[Action(2, "F", 0)] == ends[Action(1, "F", 0)] + 10.0 == 22.0
    assert starts[Action(1, "F", 1)] == 21.0


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 4), st.floats(0.1, 5))
def test_a_slower_stage_never_makes_a_step_faster(num_stages: int, count: int, which: int, more: float) -> None:
    forward_s, backward_s = [1.0] * num_stages, [2.0] * num_stages
    shape = Pipelining("1f1b", num_stages, count)
    before = simulate(shape, forward_s, backward_s).step_time_s
    forward_s[which % num_stages] += more
    assert simulate(shape, forward_s, backward_s).step_time_s >= before


def test_deadlock_shows_where_every_rank_stands() -> None:
    orders = [(Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0))]
    with pytest.raises(InvalidPlan, match="deadlocks:\n  rank 0: >0B0< 0F0\n  rank 1: >1F0< 1B0"):
        run_actions(orders, [0, 1], lambda kind: [[1.0] * 2] * 2, [0.0], [0.0])


def test_microbatches_may_take_different_times() -> None:
    shape = Pipelining("1f1b", 2, 3)
    same = simulate(shape, [1.0, 2.0], [2.0, 3.0], p2p_forward_s=0.5)
    assert simulate(shape, [[1.0] * 3, 2.0], [2.0, [3.0] * 3], p2p_forward_s=0.5) == same
    alone = simulate(Pipelining("1f1b", 1, 3), [[1.0, 2.0, 4.0]], [[0.5, 0.25, 0.125]])
    assert alone.step_time_s == 7.875
    # 0: F0 1, F1 5, then back; 1 waits for F1.
    uneven = simulate(Pipelining("gpipe", 2, 2), [[1.0, 5.0], [1.0, 1.0]], [[1.0, 1.0]] * 2)
    assert uneven.step_time_s == 10.0


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v"])
@pytest.mark.parametrize("send_s", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 8), (2, 32), (4, 8), (4, 32)])
def test_closed_form_of_slow_links(schedule: Schedule, send_s: float, ranks: int, count: int) -> None:
    """Forward and back, sends take a fifteenth of a pass of a stage to three passes."""
    virtual = 2 if schedule in ("interleaved", "zb-v") else 1
    shape = Pipelining(schedule, ranks, count, virtual)
    stages = shape.num_stages
    timeline = simulate(shape, [1.0] * stages, [2.0] * stages, p2p_forward_s=send_s)
    closed = pipeline_time(shape, [3.0] * stages, [2 * send_s] * (stages - 1))
    assert 0.8 < closed / timeline.step_time_s < 1.2
