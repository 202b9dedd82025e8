"""Message passing keeps a best labelling, and its min-marginals are lower bounds, on random instances."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.assign import message_passing
from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.instance import Factor, Instance, User, brute_force, restrict, value
from autopar.search.assign.message_passing import _Messages, prune
from autopar.search.assign.solve import solve, solve_program
from tests.search.test_ilp import instances


def a_chain(rng: np.random.Generator, num_variables: int, count: int) -> Instance:
    """Variables in a row with residual paths over three of them and factors of up to six users."""

    def states(number: int) -> np.ndarray:
        return rng.integers(0, number, count)

    factors = []
    for variable in range(num_variables - 1):
        later = [variable + 1, *(u for u in range(variable + 2, num_variables) if rng.random() < 0.3)][:6]
        factors.append(
            Factor(
                producer=variable,
                sources=states(3),
                users=tuple(User(variable=u, needs=states(4)) for u in later),
                cost=rng.random((3, 4)) * rng.choice([0.1, 1.0]),
            )
        )
    return Instance(costs=tuple(rng.random(count) for _ in range(num_variables)), factors=tuple(factors))


@settings(max_examples=200)
@given(instances())
def test_a_best_labelling_is_left(instance: Instance) -> None:
    kept = prune(instance)
    assert brute_force(restrict(instance, kept))[0] == pytest.approx(brute_force(instance)[0])


@settings(max_examples=100)
@given(instances(), st.integers(0, 3))
def test_min_marginals_are_lower_bounds(instance: Instance, num_sweeps: int) -> None:
    passing = _Messages(instance)
    for number in range(num_sweeps):
        passing._sweep(backward=number % 2 == 1)
    assert passing.bound <= brute_force(instance)[0] + 1e-9
    for labelling in product(*(range(n) for n in instance.num_labels)):
        price = value(instance, labelling)
        for min_marginals, label in zip(passing.min_marginals, labelling, strict=True):
            assert min_marginals[label] <= price + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_factors_of_many_users(seed: int) -> None:
    """More users than are partitioned."""
    instance = a_chain(np.random.default_rng(seed), 8, 3)
    best = brute_force(instance)[0]
    assert brute_force(restrict(instance, prune(instance)))[0] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_larger_instances_equal_the_integer_program(seed: int) -> None:
    instance = a_chain(np.random.default_rng(seed), 12, 12)
    solution = solve(instance)
    assert value(instance, solution.labelling) == solution.objective
    assert solution.objective == pytest.approx(value(instance, solve_program(instance)[0]))
    assert solve(instance).labelling == solution.labelling


def test_on_a_chain_one_pass_proves_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_passing, "_MAX_PASSES", 1)
    monkeypatch.setattr(message_passing, "eliminate", lambda *_: None)
    rng = np.random.default_rng(0)
    factors = [
        Factor(
            producer=user - 1,
            sources=np.arange(5),
            users=(User(variable=user, needs=np.arange(5)),),
            cost=rng.random((5, 5)),
        )
        for user in range(1, 10)
    ]
    instance = Instance(costs=tuple(rng.random(5) for _ in range(10)), factors=tuple(factors))
    kept = prune(instance)
    assert all(len(keep) == 1 for keep in kept)
    best = eliminate(instance)
    assert best is not None
    assert value(instance, [int(keep[0]) for keep in kept]) == pytest.approx(value(instance, best))


@settings(max_examples=200)
@given(instances(), st.integers(1, 3))
def test_without_a_proof_all_best_labellings_are_left(instance: Instance, max_passes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_passing, "_MAX_PASSES", max_passes)
        patch.setattr(message_passing, "eliminate", lambda *_: None)
        kept = prune(instance)
    best = brute_force(instance)[0]
    if all(len(keep) == 1 for keep in kept):
        assert value(instance, [int(keep[0]) for keep in kept]) == pytest.approx(best)
        return
    for labelling in product(*(range(n) for n in instance.num_labels)):
        if value(instance, labelling) == best:
            assert all(label in keep for label, keep in zip(labelling, kept, strict=True))
