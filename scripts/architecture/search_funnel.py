"""How many configurations of one search got how far: what bounds and estimates spared it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any
from unittest import mock

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.graph import CapturedModel
from autopar.search import api
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.space import Space
from autopar.search.pricing.build_instance import Weights
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult
from scripts.architecture.llama import llama
from scripts.architecture.svg import Picture

GPUS, GPU = 64, "h100-sxm"
WIDTH, LEFT, BAR, TALL, GAP = 860.0, 24.0, 560.0, 40.0, 34.0


@dataclass(slots=True)
class Watched(Solver):
    """A solver that notes the configurations it is asked about.

    relaxed: one inner problem was solved for all ZeRO variants at once, memory free of charge. solved: its own inner
    problem was. simulated: its stages were cut and its step simulated.
    """

    relaxed: set[Configuration] = field(default_factory=set)
    solved: set[Configuration] = field(default_factory=set)
    simulated: set[Configuration] = field(default_factory=set)

    def least(self, variants: Sequence[Configuration]) -> float:
        self.relaxed.update(variants)
        return Solver.least(self, variants)

    def inner(self, configuration: Configuration, weights: Weights) -> Inner:
        self.solved.add(configuration)
        return Solver.inner(self, configuration, weights)

    def complete(self, configuration: Configuration, *given: Any, **how: Any) -> Candidate | None:
        found = Solver.complete(self, configuration, *given, **how)
        if found is not None and not found.pruned:
            self.simulated.add(configuration)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """Numbers of configurations. problems: inner problems, some configurations at several Lagrange multipliers."""

    space: int
    relaxed: int
    solved: int
    simulated: int
    problems: int
    result: SearchResult


def funnel(captured: CapturedModel, num_gpus: int = GPUS, gpu: str = GPU) -> Funnel:
    """Of the search for ``captured`` on so many GPUs."""
    made: list[Watched] = []

    def watched(**arguments: object) -> Watched:
        made.append(Watched(**arguments))  # type: ignore[arg-type]
        return made[0]

    constraints = Constraints(precision="bf16")
    with mock.patch.object(api, "Solver", watched):
        result = api.search_captured(captured, make_cluster(gpu, num_gpus), constraints)
    (solver,) = made
    tried = solver.relaxed | solver.solved
    return Funnel(
        space=len(everything(solver, constraints) | tried),
        relaxed=len(tried),
        solved=len(solver.solved),
        simulated=len(solver.simulated),
        problems=result.num_configurations,
        result=result,
    )


def everything(solver: Solver, constraints: Constraints) -> set[Configuration]:
    """The configurations of a search space: of free axes, and of axes with one role each."""
    space = Space(solver=solver, constraints=constraints)
    free = (
        root
        for num_stages, mesh in space.nodes()
        for num in space.microbatches(mesh, constraints)
        for root in space.roots(num_stages, mesh, num, constraints)
    )
    return {variant for roots in (free, space.baselines()) for root in roots for variant in space.variants(root)}


def draw() -> Picture:
    return drawn(funnel(llama()))


def drawn(found: Funnel) -> Picture:
    plan = found.result.plan
    chosen = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)} on {plan.stage_mesh}, "
    chosen += (
        f"{plan.batch.num_microbatches} microbatches, ZeRO-{plan.zero}: {found.result.predicted.step_time_s:.2f} s"
    )
    rows = (
        ("configurations", found.space, ""),
        (
            "relaxed",
            found.relaxed,
            "pruned by a closed-form bound or estimate, or left when nothing better had come for long",
        ),
        ("solved", found.solved, "pruned by a relaxation for all of their ZeRO variants"),
        ("simulated", found.simulated, "pruned by the optimum of their inner problem, or by memory"),
        ("chosen", 1, "slower when simulated"),
    )
    picture = Picture(
        title="The funnel of a search",
        description=", ".join(f"{name}: {number}" for name, number, _ in rows),
        width=WIDTH,
    )
    picture.text(LEFT, 34, picture.title, "bold", size=17)
    result = found.result
    searched = f"{result.workload.captured.name} on {result.cluster.num_gpus} {result.cluster.device.name}"
    picture.text(
        LEFT, 54, f"{searched}: pipeline degree, stage mesh, microbatches, ZeRO; widths are logarithmic", "soft"
    )
    y, most, middle = 76.0, log10(found.space) + 1, LEFT + 140 + BAR / 2
    for number, (name, count, says) in enumerate(rows):
        if number:
            left = rows[number - 1][1] - count
            picture.text(middle, y - 12, f"−{left:,} {says}", "soft", size=12, anchor="middle")
        width = BAR * (log10(count) + 1) / most
        tone = "part-0" if number < len(rows) - 1 else "part-2"
        picture.box(middle - width / 2, y, width, TALL, tone=tone)
        picture.text(LEFT, y + 26, name, "bold", size=14)
        picture.text(LEFT + 140 + BAR + 24, y + 26, f"{count:,}", "bold", size=16)
        y += TALL + GAP
    picture.text(middle, y - 12, chosen, "bold", size=12, anchor="middle")
    problems = (
        f"{found.problems} inner problems were solved, some configurations at several Lagrange multipliers of memory"
    )
    picture.text(LEFT, y + 12, problems, "soft", size=11)
    y += 2
    picture.height = y + 28
    return picture
