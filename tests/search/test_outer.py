"""The outer search against its twin: every configuration, and in it every assignment of every op."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.passes.normalise import normalise
from autopar.search.outer.best_first import TOLERANCE, Outer, Progress
from autopar.search.outer.configuration import Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.lagrangian_sweep import lagrangian_sweep
from autopar.search.outer.prices import Prices
from autopar.search.pricing.build_instance import Weights, build
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload


class Chain(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu(layer(x))
        return F.mse_loss(last(x), target)


def outer_of(widths: tuple[int, ...], batch: int, seq: int, room: float, gpus: int) -> Outer:
    """room: memory of a GPU, as a share of the model state and activations of the whole model."""
    with torch.device("meta"):
        inputs = torch.zeros(batch, seq, widths[0]), torch.zeros(batch, seq, widths[-1])
        captured = normalise(capture(Chain(widths), inputs))
    state = 16 * sum(parameter.numel for parameter in captured.parameters.values())
    budget = room * (state + 4 * batch * seq * sum(widths))
    prices = Prices(Workload.of(captured, "fp32"), make_cluster("a100-80gb", gpus, gpus))
    solver = Solver(prices=prices, budget_bytes=budget)
    return Outer(solver=solver, constraints=Constraints())


def every_configuration(outer: Outer) -> Iterator[Configuration]:
    space = outer.space
    for num_stages, mesh in space.nodes():
        for num in space.microbatches(mesh, outer.constraints):
            for root in space.roots(num_stages, mesh, num, outer.constraints):
                yield from space.variants(root)


def best_of(outer: Outer, configuration: Configuration) -> float | None:
    """Seconds of a step of the best plan of a configuration, None if none fits; cuts are exact for each assignment."""
    solver = outer.solver
    best: float | None = None
    pricing = solver.pricing(configuration)
    options = build([pricing], solver.rules([configuration]), Weights()).options
    for assignment in product(*([own.assignment(option) for option in range(len(own))] for own in options)):
        inner = Inner(pricing=pricing, assignment=assignment, objective=0.0, shared_once=configuration.num_stages == 1)
        found = solver.complete(configuration, inner)
        if found is not None and (best is None or found.step_time_s < best):
            best = found.step_time_s
    return best


def brute_force(outer: Outer) -> float | None:
    """Of the best plan of all."""
    found = [best_of(outer, configuration) for configuration in every_configuration(outer)]
    return min((seconds for seconds in found if seconds is not None), default=None)


WIDTHS = st.sampled_from((64, 1024, 8192))


@pytest.mark.slow
@settings(max_examples=6, derandomize=True)
@given(
    widths=st.tuples(WIDTHS, WIDTHS, WIDTHS),
    batch=st.sampled_from((2, 4)),
    seq=st.sampled_from((8, 4096)),
    room=st.floats(0.2, 2.0),
)
def test_search_finds_what_trying_everything_finds(widths: tuple[int, ...], batch: int, seq: int, room: float) -> None:
    outer = outer_of(widths, batch, seq, room, gpus=2)
    found, best = outer.run(), brute_force(outer)
    if best is None or found is None:
        assert best is None and found is None
        return
    # Where memory binds, the answers come from prices of memory, and some trade-offs are the answer to no price.
    assert best <= found.predicted.step_time_s <= 1.15 * best
    assert outer.bound <= best, "no plan may beat what is said to be unbeatable"


@pytest.mark.parametrize("gpus", [4, 8])
def test_no_zero_stage_beats_the_problem_of_all_at_once(gpus: int) -> None:
    """The bound of a partial configuration holds for each of its configurations, and is theirs where there is one."""
    outer = outer_of((1024, 8192, 1024), 8, 64, room=2.0, gpus=gpus)
    solver, space, seen = outer.solver, outer.space, 0
    for num_stages, mesh in space.nodes():
        for num in space.microbatches(mesh, outer.constraints):
            for root in space.roots(num_stages, mesh, num, outer.constraints):
                variants = tuple(space.variants(root))
                every = [solver.inner(configuration, Weights(sync=0.0)).objective for configuration in variants]
                together = solver.least(variants)
                assert together <= min(every) * (1 + 1e-9)
                assert together >= 0.5 * min(every), "a bound that is no use"
                assert len(variants) > 1 or together == pytest.approx(every[0], rel=1e-9)
                seen += len(variants) > 1
    assert seen > 5


@pytest.mark.parametrize("seq", [8, 4096])
def test_with_room_for_all_the_search_is_exact(seq: int) -> None:
    outer = outer_of((1024, 8192, 1024), 4, seq, room=2.0, gpus=2)
    found, best = outer.run(), brute_force(outer)
    assert found is not None
    assert found.predicted.step_time_s == pytest.approx(best, rel=TOLERANCE)


@pytest.mark.parametrize(("seq", "room"), [(8, 0.8), (4096, 0.75), (4096, 0.9)])
def test_no_plan_of_a_configuration_beats_its_bounds(seq: int, room: float) -> None:
    outer = outer_of((1024, 8192, 1024), 2, seq, room, gpus=2)
    compared = 0
    for configuration in every_configuration(outer):
        best = best_of(outer, configuration)
        if best is None:
            continue
        inner = outer.solver.inner(configuration, Weights(sync=0.0))
        bounds = [bound for _, bound in lagrangian_sweep(outer.solver, outer.bounds, configuration, inner)]
        bounds += [
            outer.bounds.ideal_s(configuration.num_stages, configuration.num_microbatches),
            outer.bounds.pipelined(inner.objective, configuration),
        ]
        assert max(bounds) <= best * (1 + 1e-9)
        compared += 1
    assert compared


@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_it_returns_the_best_so_far(after: int) -> None:
    widths: tuple[int, ...] = (1024, 4096, 1024, 4096)
    said: list[Progress] = []
    best = outer_of(widths, 64, 16, 2.0, 8).run()
    assert best is not None
    outer = outer_of(widths, 64, 16, 2.0, 8)

    def interrupt(progress: Progress) -> None:
        said.append(progress)
        if len(said) == after:
            raise KeyboardInterrupt

    outer.report = interrupt
    found = outer.run()
    assert found is not None and outer.interrupted
    assert outer.bound <= best.step_time_s <= found.step_time_s == said[-1].best_s


def test_before_there_is_a_plan_an_interrupt_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = outer_of((1024, 4096, 1024), 64, 16, 2.0, 8)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Outer, "seed", lambda self: interrupt())
    with pytest.raises(KeyboardInterrupt):
        outer.run()


def test_reports_close_in_on_the_best() -> None:
    outer = outer_of((1024, 4096, 1024, 4096), 64, 16, 0.3, 8)
    said: list[Progress] = []
    outer.report = said.append
    best = outer.run()
    assert best is not None and said
    found = [progress.best_s for progress in said if progress.best_s is not None]
    assert found == sorted(found, reverse=True) and found[-1] == best.step_time_s
    bounds = [progress.bound_s for progress in said]
    assert bounds == sorted(bounds) and bounds[-1] <= best.step_time_s
    assert all(0 <= a.share <= b.share <= 1 for a, b in pairwise(said))
