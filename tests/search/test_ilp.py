"""The inner solver and its reductions equal brute force on random instances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.assign import solve as solve_module
from autopar.search.assign.bucket_elimination import eliminate
from autopar.search.assign.dead_end_elimination import reduce
from autopar.search.assign.instance import Factor, Instance, User, absorb, brute_force, value
from autopar.search.assign.solve import solve, solve_program


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    num_labels = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    number = st.integers(0, 6).map(float)  # small whole numbers make ties frequent
    costs = tuple(np.array(draw(st.lists(number, min_size=n, max_size=n))) for n in num_labels)
    variable = st.integers(0, len(num_labels) - 1)
    factors = []
    for _ in range(draw(st.integers(0, 5))):
        producer, users = draw(variable), draw(st.lists(variable, min_size=1, max_size=3))
        num_sources, num_needs = draw(st.integers(1, 3)), draw(st.integers(1, 4))

        def states(of: int, count: int) -> np.ndarray:
            return np.array(draw(st.lists(st.integers(0, count - 1), min_size=num_labels[of], max_size=num_labels[of])))

        price = draw(st.lists(number, min_size=num_sources * num_needs, max_size=num_sources * num_needs))
        factors.append(
            Factor(
                producer=producer,
                sources=states(producer, num_sources),
                users=tuple(User(variable=u, needs=states(u, num_needs)) for u in users),
                cost=np.array(price).reshape(num_sources, num_needs),
            )
        )
    return Instance(costs=costs, factors=tuple(factors))


@settings(max_examples=200)
@given(instances())
def test_solver_equals_brute_force(instance: Instance) -> None:
    solution = solve(instance)
    assert solution.objective == pytest.approx(brute_force(instance)[0])
    assert value(instance, solution.labelling) == solution.objective


@settings(max_examples=200)
@given(instances())
def test_elimination_and_the_linear_program_equal_brute_force(instance: Instance) -> None:
    best = brute_force(instance)[0]
    eliminated = eliminate(instance)
    assert eliminated is not None
    assert value(instance, eliminated) == pytest.approx(best)
    assert value(instance, solve_program(instance)[0]) == pytest.approx(best)


def test_elimination_leaves_large_tables_to_the_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    factors = [
        Factor(
            producer=producer,
            sources=np.arange(3),
            users=(User(variable=user, needs=np.arange(3)),),
            cost=rng.integers(0, 9, (3, 3)).astype(float),
        )
        for producer in range(5)
        for user in range(producer)
    ]
    instance = Instance(costs=tuple(rng.random(3) for _ in range(5)), factors=tuple(factors))
    assert eliminate(instance, 3**5 - 1) is None
    monkeypatch.setattr(solve_module, "eliminate", lambda *_: None)
    assert solve(instance).objective == pytest.approx(brute_force(instance)[0])


@settings(max_examples=200)
@given(instances())
def test_reduction_keeps_the_optimum(instance: Instance) -> None:
    reduced, kept = reduce(instance)
    best, labelling = brute_force(reduced)
    assert best == pytest.approx(brute_force(instance)[0])
    assert value(instance, [int(k[o]) for k, o in zip(kept, labelling, strict=True)]) == pytest.approx(best)


@settings(max_examples=100)
@given(instances(), st.randoms(use_true_random=False))
def test_absorbing_keeps_every_value(instance: Instance, random) -> None:
    labelling = [random.randrange(n) for n in instance.num_labels]
    assert value(absorb(instance), labelling) == pytest.approx(value(instance, labelling))


def test_a_conversion_needed_twice_is_paid_once() -> None:
    factor = Factor(
        producer=0,
        sources=np.array([0]),
        users=(User(variable=1, needs=np.array([0, 1])), User(variable=2, needs=np.array([0, 1]))),
        cost=np.array([[5.0, 3.0]]),
    )
    instance = Instance(costs=(np.zeros(1), np.zeros(2), np.array([4.0, 0.0])), factors=(factor,))
    solution = solve(instance)
    assert solution.labelling == (0, 1, 1)
    assert solution.objective == 3.0
