"""Stage cuts equal brute force, and are found quickly for deep models."""

from __future__ import annotations

import time
from itertools import combinations, combinations_with_replacement, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.ir.rematerialisation import LEVELS
from autopar.ir.schedule import Pipelining
from autopar.search.stages.least_times import LeastTimes
from autopar.search.stages.stage import BlockCost, Stage, stage_memory, stage_time
from autopar.search.stages.stage_cuts import cut, cut_pipeline, cuts_time


def brute_force(blocks, live, weights, budgets, levels) -> float | None:
    n = len(blocks)
    best = None
    for inner in combinations(range(1, n), len(live) - 1):
        bounds = [0, *inner, n]
        options = []
        for number, (a, b) in enumerate(pairwise(bounds)):
            mine = []
            for full in range(b - a + 1):
                for middle, partly in product(("selective", "alternate"), range(b - a - full + 1)):
                    remat = (LEVELS.index("full"), full), (LEVELS.index(middle), partly)
                    stage = Stage(first=a, last=b - 1, remat=remat)
                    used = {LEVELS[stage.level(block)] for block in range(a, b)}
                    if used <= set(levels) and stage_memory(blocks, stage, live[number]) <= budgets[number]:
                        mine.append(stage)
            options.append(mine)
        for stages in _product(options):
            objective = cuts_time(blocks, stages, weights)
            if best is None or objective < best:
                best = objective
    return best


def _product(options):
    if not options:
        yield ()
        return
    for first in options[0]:
        for rest in _product(options[1:]):
            yield (first, *rest)


@st.composite
def problems(draw: st.DrawFn):
    number = st.integers(0, 9).map(float)

    def block() -> BlockCost:
        if draw(st.booleans()):  # rematerialisation takes more time and less memory, as it should
            times, saved = (
                sorted(draw(st.tuples(number, number, number, number))),
                sorted(draw(st.tuples(number, number, number, number))),
            )
            saved = saved[::-1]
        else:
            times, saved = (draw(st.tuples(number, number, number, number)) for _ in range(2))
        return BlockCost(
            time_s=tuple(times),
            saved_bytes=tuple(saved),
            static_bytes=draw(number),
            workspace_bytes=draw(number),
            send_s=draw(number),
        )

    blocks = [block() for _ in range(draw(st.integers(1, 5)))]
    live = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    levels = draw(st.sampled_from([("none",), ("full",), ("selective",), ("alternate",), ("none", "full"), LEVELS]))
    weights = draw(st.sampled_from([(1.0, 0.0), (1.0, 3.0), (0.5, 7.5), (1 / 3, 1.0)]))
    budgets = draw(st.lists(st.integers(0, 60).map(float), min_size=len(live), max_size=len(live)))
    return blocks, live, weights, draw(st.sampled_from([budgets, budgets[:1] * len(live)])), levels


@settings(max_examples=200)
@given(problems())
def test_cuts_equal_brute_force(problem) -> None:
    blocks, live, weights, budgets, levels = problem
    expected = brute_force(blocks, live, weights, budgets, levels)
    found = cut(blocks, live, weights, budgets, levels)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.time_s == pytest.approx(expected)
    assert cuts_time(blocks, found.stages, weights) == pytest.approx(expected)
    for stage, count, budget in zip(found.stages, live, budgets, strict=True):
        assert stage_memory(blocks, stage, count) <= budget * (1 + 1e-9) + 1e-5


@st.composite
def blocks_with_sets(draw: st.DrawFn) -> list[BlockCost]:
    """Beside the levels three sets, of which each keeps less than the one before and takes longer."""
    number = st.integers(0, 9).map(float)

    def block() -> BlockCost:
        return BlockCost(
            time_s=(*draw(st.tuples(*[number] * 4)), *sorted(draw(st.tuples(*[number] * 3)))),
            saved_bytes=(*draw(st.tuples(*[number] * 4)), *sorted(draw(st.tuples(*[number] * 3)), reverse=True)),
            static_bytes=draw(number),
            workspace_bytes=draw(number),
        )

    return [block() for _ in range(draw(st.integers(1, 5)))]


# A set keeps more than level none.
SET_ABOVE_NONE = [
    BlockCost(
        time_s=(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0), saved_bytes=(0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0), static_bytes=0.0
    ),
    BlockCost(time_s=(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0), saved_bytes=(0.0,) * 7, static_bytes=0.0),
]


@settings(max_examples=200)
@given(blocks_with_sets(), st.integers(1, 3), st.integers(0, 60).map(float), st.sampled_from([(), LEVELS]))
@example(SET_ABOVE_NONE, 1, 0.0, LEVELS)
def test_two_of_all_sets_are_used_as_well_as_can_be(blocks, live, budget, levels) -> None:
    last, best = len(blocks) - 1, None
    for less, more in combinations_with_replacement(range(len(LEVELS), len(LEVELS) + 3), 2):
        for count in range(len(blocks) + 1):
            stage = Stage(first=0, last=last, remat=((more, count), (less, len(blocks) - count)))
            if stage_memory(blocks, stage, live) <= budget:
                seconds = stage_time(blocks, stage)
                best = seconds if best is None else min(best, seconds)
    found = cut(blocks, [live], (1.0, 0.0), [budget], levels)
    plain = brute_force(blocks, [live], (1.0, 0.0), [budget], LEVELS) if levels else None
    if best is None and plain is None:
        assert found is None or levels  # a level and a set
        return
    assert found is not None
    assert found.time_s <= min(own for own in (best, plain) if own is not None) + 1e-9
    assert found.time_s == pytest.approx(stage_time(blocks, found.stages[0]))
    assert stage_memory(blocks, found.stages[0], live) <= budget * (1 + 1e-9) + 1e-5
    if not levels:
        assert best == pytest.approx(found.time_s)


def test_activations_have_a_budget_of_their_own() -> None:
    block = BlockCost(time_s=(1.0, 2.0, 3.0, 4.0), saved_bytes=(8.0, 4.0, 2.0, 1.0), static_bytes=10.0)
    found = cut([block] * 4, [2], (1.0, 0.0), [1000.0], LEVELS, saved=40.0)
    assert found is not None
    (stage,) = found.stages
    assert 2 * sum(block.saved_bytes[stage.level(number)] for number in range(4)) <= 40.0
    assert cut([block] * 4, [2], (1.0, 0.0), [1000.0], LEVELS, saved=7.0) is None


@settings(max_examples=200)
@given(problems(), st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("naive", 1)]))
def test_least_times_bound_every_cut(problem, named) -> None:
    blocks, _, _, (budget, *_), levels = problem
    (schedule, virtual), times = named, LeastTimes.of(blocks)
    shape = Pipelining(schedule, 2, 4, virtual)
    links = [float(shape.rank_of(n) != shape.rank_of(n + 1)) for n in range(shape.num_stages - 1)]
    for room in (10.0 * budget, 1e9):
        found = cut_pipeline(blocks, shape, room, levels, links)
        assert found is None or times.step_s(shape, links) <= found.time_s * (1 + 1e-9)


def test_of_no_microbatch_everything_is_saved() -> None:
    """A stage of which only gradients of weights are left to compute, where keeping less takes less time."""
    times, saved = (1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)
    blocks = [BlockCost(time_s=times, saved_bytes=saved, static_bytes=0.0, delayed_bytes=1.0)] * 2
    found = cut(blocks, [2, 1], (1.0, 0.0), [2.0, 1.0], waiting=[2, 0])
    assert found is not None
    assert found.time_s == 0.0
    assert cut(blocks, [2, 1], (1.0, 0.0), [1.0, 1.0], waiting=[2, 0]) is None


def test_least_times_are_those_of_the_most_even_ranks() -> None:
    """Of fourteen equal blocks some of four ranks has four, however many stages it has."""
    block = BlockCost(time_s=(3.0, 3.2, 3.5, 4.0), saved_bytes=(0.0,) * 4, static_bytes=0.0)
    for shape in (Pipelining("1f1b", 4, 8), Pipelining("interleaved", 4, 8, 3)):
        found = cut_pipeline([block] * 14, shape, 1.0)
        assert found is not None
        assert LeastTimes.of([block] * 14).step_s(shape, [1.0] * (shape.num_stages - 1)) == pytest.approx(found.time_s)


@pytest.mark.parametrize("virtual", [1, 2, 4, 5, 10, 20])
def test_stages_of_a_rank_share_its_memory(virtual: int) -> None:
    """Virtual stages hold no more together, and add no more than a tenth of the time; of a block each, a fifth."""
    layer = BlockCost(
        time_s=(3.0, 3.2, 3.5, 4.0), saved_bytes=(10.0, 7.0, 5.0, 1.0), static_bytes=20.0, workspace_bytes=40.0
    )
    blocks, shape = [layer] * 80, Pipelining("interleaved" if virtual > 1 else "1f1b", 4, 32, virtual)
    found = cut_pipeline(blocks, shape, 900.0)
    assert found is not None
    for numbers in map(shape.stages_of, range(4)):
        held = sum(stage_memory(blocks, found.stages[number], shape.live()[number]) for number in numbers)
        assert held - (virtual - 1) * 40.0 <= 900.0 * (1 + 1e-9)
    plain = cut_pipeline(blocks, Pipelining("1f1b", 4, 32), 900.0)
    assert plain is not None
    assert found.time_s < (1.1 if virtual < 20 else 1.2) * plain.time_s


def test_deep_model_takes_well_under_a_second() -> None:
    layer = BlockCost(time_s=(3.0, 3.2, 3.5, 4.0), saved_bytes=(10.0, 7.0, 5.0, 1.0), static_bytes=20.0, send_s=0.01)
    ends = [
        BlockCost(time_s=(1.0,) * 4, saved_bytes=(1.0,) * 4, static_bytes=30.0),
        BlockCost(time_s=(2.0,) * 4, saved_bytes=(5.0,) * 4, static_bytes=30.0, workspace_bytes=9.0),
    ]
    blocks = [ends[0], *[layer] * 84, ends[1]]
    start = time.process_time()
    found = cut(blocks, [16 - i for i in range(16)], (1.0, 63.0), [700.0] * 16)
    assert found is not None
    assert time.process_time() - start < 1.0
    assert any(stage.is_rematerialised for stage in found.stages)
