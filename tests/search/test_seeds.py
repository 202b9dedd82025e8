"""Good plans to begin with: which baselines come first, and stages that are cut again to fill the memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from autopar.search.outer.baselines import BEST, Seeds
from autopar.search.outer.best_first import Outer
from autopar.search.outer.configuration import Candidate, Configuration
from autopar.search.outer.outcome import Outcome
from autopar.search.pricing.build_instance import Weights
from tests.search.test_outer import outer_of

DEEP = (512, *(2048, 512) * 6)


def outer_with(room: float) -> Outer:
    return outer_of(DEEP, batch=16, seq=4096, room=room, gpus=8)


def test_pipeline_degrees_and_meshes_take_turns() -> None:
    outer = outer_with(2.0)
    order = list(Seeds(outer).in_turns())
    degrees = sorted({one.num_stages for one in order})
    assert len(degrees) > 2
    assert sorted(one.num_stages for one in order[: len(degrees)]) == degrees, "each degree once, before any again"
    for stages in degrees:
        own = [one for one in order if one.num_stages == stages]
        meshes = {one.mesh for one in own}
        assert {one.mesh for one in own[: len(meshes)]} == meshes
        for mesh in meshes:
            estimates = [outer.bounds.estimate_s(stages, one.num_microbatches) for one in own if one.mesh == mesh]
            assert estimates[0] == min(estimates), "the most promising number of microbatches first"


def test_every_baseline_is_looked_at_and_the_best_in_earnest() -> None:
    outer = outer_with(2.0)
    seeds = Seeds(outer)
    seeds.solve_relaxed(list(seeds.in_turns()))
    assert set(seeds.outcomes) == set(seeds.in_turns())
    assert outer.best is not None
    fitting = seeds.best(BEST, fitting=True)
    assert fitting and seeds.outcomes[fitting[0]].step_time_s == outer.best.step_time_s
    around = {near.num_microbatches for near in seeds.near(fitting[:1])}
    assert len(around) > 1 and {(c.mesh, c.num_stages) for c in seeds.near(fitting[:1])} == {
        (fitting[0].mesh, fitting[0].num_stages)
    }


@pytest.mark.parametrize(("gpus", "batch", "room"), [(8, 16, 2.0), (64, 64, 0.2), (64, 256, 0.05)])
def test_what_is_like_slow_baselines_is_passed_over(gpus: int, batch: int, room: float) -> None:
    outer = outer_of(DEEP, batch=batch, seq=4096, room=room, gpus=gpus)
    seeds = Seeds(outer)
    passed_over: list[Configuration] = []
    for configuration in seeds.in_turns():
        if configuration not in seeds.outcomes and seeds.by_others(configuration) is not None:
            passed_over.append(configuration)
        seeds.solve_relaxed([configuration])
    assert len(passed_over) > 4
    record_s = outer.record_s
    for configuration in passed_over:
        looked_into = outer.expand(configuration, relaxed=True)
        assert looked_into.least_s >= record_s, f"{configuration} was worth while"


def test_where_the_state_is_large_baselines_start_with_it_divided() -> None:
    roomy, crowded = ({one.zero for one in Seeds(outer_with(room)).in_turns()} for room in (50.0, 0.05))
    assert 0 in roomy
    assert max(crowded) == 3


def test_stages_are_cut_again_to_fill_the_memory() -> None:
    """Cuts count memory in a sum, the prediction as a profile: one cut leaves room, or finds nothing at all."""
    better = 0
    for room in (0.04, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13):
        outer = outer_with(room)
        solver = outer.solver
        for configuration in Seeds(outer).in_turns():
            if configuration.num_stages == 1 or configuration.num_microbatches > 8:
                continue
            inner = solver.inner(configuration, Weights(sync=0.0))
            for shape in solver.shapes(configuration)[:2]:
                own = replace(configuration, schedule=shape.schedule, virtual_stages=shape.virtual_stages)
                cuts = solver._cut(own, inner, solver.budget_bytes, inf)
                first, last = (solver._complete(own, inner, inf, count, cuts) for count in (1, 3))
                for found in (first, last):
                    assert found is None or found.predicted.peak_bytes <= solver.budget_bytes
                assert last is not None or first is None
                better += _is_better(last, first)
    assert better > 1


def _is_better(last: Candidate | None, first: Candidate | None) -> bool:
    if last is None or first is None:
        return last is not first
    assert last.step_time_s <= first.step_time_s
    return last.step_time_s < first.step_time_s


def test_too_few_microbatches_do_not_rule_a_baseline_out() -> None:
    """Where no level of rematerialisation fits, the bound of a configuration is infinite; more microbatches may fit."""
    outer = outer_of(DEEP, batch=256, seq=4096, room=0.01, gpus=8)
    seeds = Seeds(outer)
    configuration = next(one for one in seeds.in_turns(leanest=True) if one.num_stages == one.num_microbatches == 1)
    assert outer.bounds.ideal_s(1, 1) == inf > outer.bounds.ideal_s(1, 32)
    assert outer.solver.least_state_of(configuration) < outer.solver.budget_bytes
    seeds.outcomes[configuration] = Outcome(None, inf)
    found = list(seeds.smaller())
    assert found and all(one.mesh == configuration.mesh and one.num_microbatches > 1 for one in found)
