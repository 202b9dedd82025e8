"""Every pass of normalisation as text that was read and kept; and that its contract says what its place depends on."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.passes import pipeline
from autopar.passes.contract import Pass, check_order
from autopar.passes.normalise import normal_form
from autopar.passes.pipeline import run_passes
from tests.passes.golden.rewrites import CASES, captured_model, models, path_of, text

PASSES = normal_form()


@pytest.mark.parametrize("name", CASES)
def test_every_pass_makes_of_a_model_what_it_is_known_to(name: str) -> None:
    assert text(name) == path_of(name).read_text()


def test_every_pass_has_three_models() -> None:
    assert set(CASES) == {step.name for step in PASSES}
    assert min(len(set(bodies)) for bodies in CASES.values()) >= 3


Order = tuple[Pass[CapturedModel], ...]


def value_numbers(captured: CapturedModel) -> tuple[Any, int]:
    """What a graph returns as an expression of its inputs, whatever its nodes are called, and how many nodes it has."""
    numbers: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        called = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        numbers[node] = hash((node.op, node.name if node.op == "placeholder" else str(node.target), str(called)))
    return numbers[next(iter(reversed(captured.graph.nodes)))], len(captured.graph.nodes)


@cache
def results(order: Order) -> tuple[Any, ...]:
    """What the passes in this order make of every model; the error, where one fails."""
    made: list[Any] = []
    for name in models():
        try:
            made.append(value_numbers(run_passes(captured_model(name), order, check=False)))
        except Exception as error:
            made.append(repr(error))
    return tuple(made)


# A requirement or an exclusion as (the place that comes first, the one that comes after it, the fact).
CONTRACTS = {
    pair
    for place, step in enumerate(PASSES[:-1])
    for other, provider in enumerate(PASSES[:-1])
    for pair in (
        *((other, place, fact) for fact in step.requires & provider.provides),
        *((place, other, fact) for fact in step.conflicts & provider.provides),
    )
}


def random_order(pairs: set[tuple[int, int, str]], seed: int) -> Order:
    """The passes in an order in which the first of each pair comes first, and the last, which cleans up, last."""
    draw, left, order = random.Random(seed), set(range(len(PASSES) - 1)), []
    while left:
        waits = {after for first, after, _ in pairs if first in left}
        order.append(draw.choice(sorted(left - waits)))
        left.remove(order[-1])
    return (*(PASSES[place] for place in order), PASSES[-1])


@pytest.mark.parametrize("seed", range(6))
def test_orders_that_the_contracts_permit_have_one_normal_form(seed: int) -> None:
    order = random_order(CONTRACTS, seed)
    check_order(order)
    assert order != PASSES and results(order) == results(PASSES)


@pytest.mark.parametrize("pair", sorted(CONTRACTS), ids=lambda pair: f"{PASSES[pair[1]].name} {pair[2]}")
def test_what_a_contract_refuses_makes_a_difference(
    pair: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, after, fact = pair
    order = random_order(CONTRACTS - {pair} | {(after, first, fact)}, 0)
    with pytest.raises(AssertionError, match=fact):
        check_order(order)
    monkeypatch.setattr(pipeline, "check_order", lambda passes: None)
    assert results(order) != results(PASSES)
