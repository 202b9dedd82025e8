"""Orders that are found for given passes run to their end, within what they may keep, and leave few gaps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.schedule.pipeline_simulator import simulate
from autopar.ir.errors import InvalidPlan
from autopar.ir.list_scheduling import PassTimes
from autopar.ir.schedule import Pipelining
from autopar.passes.verify.schedule import verify_schedule


@st.composite
def shapes(draw: st.DrawFn) -> Pipelining:
    ranks, virtual, count = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 12))

    def numbers(size: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(1, most), min_size=size, max_size=size)))

    stages = ranks * virtual
    times = PassTimes(
        forward=numbers(stages, 20),
        inputs=numbers(stages, 20),
        weights=numbers(stages, 20),
        alive=numbers(ranks, 8),
        waiting=numbers(ranks, 8),
        send=draw(st.integers(0, 10)),
        urgent=draw(st.sampled_from(["inputs", "forwards"])),
    )
    turns = virtual == 2 and draw(st.booleans())
    shape = Pipelining("found", ranks, count, virtual, times, turns)
    shape.check()
    return shape


@given(shapes())
def test_every_order_is_proved(shape: Pipelining) -> None:
    verify_schedule(shape)


@given(shapes())
def test_ranks_keep_no_more_than_they_may(shape: Pipelining) -> None:
    assert shape.passes is not None
    for rank, order in enumerate(shape.orders()):
        own = shape.stages_of(rank)
        done, waiting = Counter[tuple[int, str]](), 0
        for stage, kind, _ in order:
            done[stage, kind] += 1
            waiting += {"I": 1, "W": -1}.get(kind, 0) if stage else 0
            alive = done[own[0], "F"] - min(done[other, "W"] for other in own)
            assert alive <= shape.passes.alive[rank]
            assert waiting <= shape.passes.waiting[rank]


def found(ranks: int, count: int, times: tuple[float, float, float]) -> float:
    """Seconds of a step of equal stages, the first of which has its backward in one piece."""
    ticks = [max(1, round(10 * own)) for own in times]
    passes = PassTimes(
        forward=(ticks[0],) * ranks,
        inputs=(1, *[ticks[1]] * (ranks - 1)),
        weights=(ticks[1] + ticks[2] - 1, *[ticks[2]] * (ranks - 1)),
        alive=(2 * ranks,) * ranks,
        waiting=(2 * ranks,) * ranks,
    )
    return seconds(Pipelining("found", ranks, count, passes=passes), times)


def seconds(shape: Pipelining, times: tuple[float, float, float]) -> float:
    (forward, inputs, weights), ranks = times, shape.num_ranks
    own = [inputs * bool(stage) for stage in range(ranks)], [weights + inputs * (not stage) for stage in range(ranks)]
    return simulate(shape, [forward] * ranks, [inputs + weights] * ranks, own).step_time_s


SHAPES = [(2, 8), (4, 16), (8, 32)]


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.2, 0.8)])
@pytest.mark.parametrize(("ranks", "count"), SHAPES)
def test_an_order_for_the_times_at_hand_is_near_the_least(
    ranks: int, count: int, times: tuple[float, float, float]
) -> None:
    """A step takes what a rank computes at least, and the last rank begins after a forward of every other."""
    assert found(ranks, count, times) <= 1.03 * (count * sum(times) + (ranks - 1) * times[0])


@pytest.mark.parametrize("times", [(1.0, 2.0, 0.4), (1.0, 2.2, 0.8), (1.0, 1.0, 0.3)])
@pytest.mark.parametrize(("ranks", "count"), SHAPES)
def test_an_order_for_the_times_at_hand_is_as_good_as_one_with_a_name(
    ranks: int, count: int, times: tuple[float, float, float]
) -> None:
    """Also where little is left for later, as after recomputation."""
    named = [seconds(Pipelining(name, ranks, count), times) for name in ("1f1b", "zb-h1", "zb-2p")]
    assert found(ranks, count, times) <= 1.005 * min(named)


def test_an_order_without_passes_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="the order of found is found for how long passes take"):
        Pipelining("found", 2, 4).check()
    passes = PassTimes.equal(2, 4, 2)
    with pytest.raises(InvalidPlan, match=r"passes.forward has 2 values from 1 on, expected 4 of 1 or more"):
        Pipelining("found", 2, 4, 2, passes).check()
    with pytest.raises(InvalidPlan, match="stages in a v are 2 a rank, not 1"):
        Pipelining("found", 2, 4, 1, passes, turns=True).check()
    with pytest.raises(InvalidPlan, match="1f1b has an order of its own"):
        Pipelining("1f1b", 2, 4, 1, passes).check()
