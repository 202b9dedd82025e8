"""The Lagrangian sweep: one configuration under rising Lagrange multipliers of memory."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.search.outer.configuration import Configuration, Inner
from autopar.search.outer.configuration_solver import Solver, job
from autopar.search.outer.lower_bounds import Bounds
from autopar.search.pricing.build_instance import Weights

# Multipliers tried at a configuration that does not fit at 0, in (step time) / (memory budget). Chosen; half and twice
# of each give the same plans on two models, for 3 % more work (docs/decisions/0021).
MULTIPLIERS = (0.02, 0.1, 0.5, 2.0, 10.0)


def lagrangian_sweep(
    solver: Solver, bounds: Bounds, configuration: Configuration, inner: Inner
) -> Iterator[tuple[Inner | None, float]]:
    """Answers at rising multipliers, each once, and lower bounds on all plans of ``configuration``, in seconds.

    The memory of a plan is at most ``room``, so for any multiplier the optimum of seconds + multiplier * memory less
    multiplier * room is a lower bound on the seconds (Lagrangian duality). An answer that is optimal at two multipliers
    is optimal between them. inner: the answer at multiplier 0.
    """
    _, room = solver.room(configuration.num_stages, configuration.num_microbatches, configuration.constraints)
    naive = bounds.may_be_naive(configuration.num_stages)

    def weights(multiplier: float) -> Weights:
        return solver.memory_weights(configuration, multiplier * inner.objective / solver.budget_bytes)

    def at(multiplier: float) -> tuple[Inner, float]:
        seconds = multiplier * inner.objective / solver.budget_bytes
        answer = solver.inner(configuration, weights(multiplier))
        bound = bounds.pipelined(answer.objective - seconds * room, configuration)
        return answer, min(bound, inner.objective) if naive else bound

    last = inner.assignment
    with solver.ahead.expecting(
        lambda: (job((configuration,), weights(multiplier)) for multiplier in MULTIPLIERS[:-1])
    ):
        leanest, bound = at(MULTIPLIERS[-1])
        yield None, bound
        for multiplier in MULTIPLIERS[:-1]:
            answer, bound = at(multiplier)
            yield answer if answer.assignment != last else None, bound
            last = answer.assignment
            if leanest.assignment == last:
                return
    yield leanest, bound
