"""Message passing keeps a best selection, and its floors are lower bounds, on random instances."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.assign import message_passing
from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.instance import Flow, Instance, User, brute_force, restrict, value
from autopar.search.assign.message_passing import _Messages, prune
from autopar.search.assign.solve import solve, solve_program
from tests.search.test_ilp import instances


def a_chain(rng: np.random.Generator, num_units: int, count: int) -> Instance:
    """Units in a row with residual paths over three of them and flows of up to six users."""

    def states(number: int) -> np.ndarray:
        return rng.integers(0, number, count)

    flows = []
    for unit in range(num_units - 1):
        later = [unit + 1, *(u for u in range(unit + 2, num_units) if rng.random() < 0.3)][:6]
        flows.append(
            Flow(
                producer=unit,
                sources=states(3),
                users=tuple(User(unit=u, needs=states(4)) for u in later),
                cost=rng.random((3, 4)) * rng.choice([0.1, 1.0]),
            )
        )
    return Instance(costs=tuple(rng.random(count) for _ in range(num_units)), flows=tuple(flows))


@settings(max_examples=200)
@given(instances())
def test_a_best_selection_is_left(instance: Instance) -> None:
    kept = prune(instance)
    assert brute_force(restrict(instance, kept))[0] == pytest.approx(brute_force(instance)[0])


@settings(max_examples=100)
@given(instances(), st.integers(0, 3))
def test_floors_are_lower_bounds(instance: Instance, num_sweeps: int) -> None:
    passing = _Messages(instance)
    for number in range(num_sweeps):
        passing._sweep(backward=number % 2 == 1)
    assert passing.bound <= brute_force(instance)[0] + 1e-9
    for selection in product(*(range(n) for n in instance.num_options)):
        price = value(instance, selection)
        for floors, option in zip(passing.floors, selection, strict=True):
            assert floors[option] <= price + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_flows_of_many_users(seed: int) -> None:
    """More users than are partitioned."""
    instance = a_chain(np.random.default_rng(seed), 8, 3)
    best = brute_force(instance)[0]
    assert brute_force(restrict(instance, prune(instance)))[0] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_larger_instances_equal_the_integer_program(seed: int) -> None:
    instance = a_chain(np.random.default_rng(seed), 12, 12)
    solution = solve(instance)
    assert value(instance, solution.selection) == solution.objective
    assert solution.objective == pytest.approx(value(instance, solve_program(instance)[0]))
    assert solve(instance).selection == solution.selection


def test_on_a_chain_one_pass_proves_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_passing, "_MAX_PASSES", 1)
    monkeypatch.setattr(message_passing, "eliminate", lambda *_: None)
    rng = np.random.default_rng(0)
    flows = [
        Flow(
            producer=user - 1,
            sources=np.arange(5),
            users=(User(unit=user, needs=np.arange(5)),),
            cost=rng.random((5, 5)),
        )
        for user in range(1, 10)
    ]
    instance = Instance(costs=tuple(rng.random(5) for _ in range(10)), flows=tuple(flows))
    kept = prune(instance)
    assert all(len(keep) == 1 for keep in kept)
    best = eliminate(instance)
    assert best is not None
    assert value(instance, [int(keep[0]) for keep in kept]) == pytest.approx(value(instance, best))


@settings(max_examples=200)
@given(instances(), st.integers(1, 3))
def test_without_a_proof_all_best_selections_are_left(instance: Instance, max_passes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_passing, "_MAX_PASSES", max_passes)
        patch.setattr(message_passing, "eliminate", lambda *_: None)
        kept = prune(instance)
    best = brute_force(instance)[0]
    if all(len(keep) == 1 for keep in kept):
        assert value(instance, [int(keep[0]) for keep in kept]) == pytest.approx(best)
        return
    for selection in product(*(range(n) for n in instance.num_options)):
        if value(instance, selection) == best:
            assert all(option in keep for option, keep in zip(selection, kept, strict=True))
