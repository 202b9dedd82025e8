"""Pairs of DualPipeV: which they are, and how long a step with them takes."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.cost_model.schedule.pipeline_simulator import simulate
from autopar.ir.pairs import paired, run_at_once
from autopar.ir.schedule import Pipelining, Schedule

SHAPES = st.integers(2, 6).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(2 * ranks, 5 * ranks)))


@given(SHAPES)
def test_pairs_are_of_two_stages(sizes: tuple[int, int]) -> None:
    ranks, count = sizes
    shape = Pipelining("dualpipe-v", ranks, count, 2)
    for order in shape.orders():
        pairs = list(paired(order))
        assert tuple(chain(*pairs)) == order
        for own in pairs:
            assert len(own) == 1 or (own[0].kind, own[1].kind) == ("F", "B")
            assert len({action.stage for action in own}) == len(own)


@given(SHAPES, st.floats(0, 1))
def test_a_step_is_shorter_by_what_pairs_hide(sizes: tuple[int, int], hidden: float) -> None:
    ranks, count = sizes
    shape = Pipelining("dualpipe-v", ranks, count, 2)
    seconds = [1.0] * 2 * ranks, [2.0] * 2 * ranks
    apart = simulate(shape, *seconds)
    beside = simulate(shape, *seconds, hidden_s=lambda ahead, back: hidden)
    most = max(sum(len(own) == 2 for own in paired(order)) for order in shape.orders())
    assert apart.step_time_s - hidden * most <= beside.step_time_s + 1e-9
    # Either is through when both are: the pipeline fills by as much later.
    assert beside.step_time_s <= apart.step_time_s - hidden * (count - ranks) + ranks
    for order, events in zip(shape.orders(), beside.events, strict=True):
        assert tuple(event.action for event in events) == order
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(events))


ABLE: dict[str, Any] = {"able": True, "zero": 2, "on_host": False, "communicates": True, "nodes": ()}


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("zb-v", {}),
        ("dualpipe-v", {"able": False}),
        ("dualpipe-v", {"zero": 3}),
        ("dualpipe-v", {"on_host": True}),
        ("dualpipe-v", {"communicates": False}),
        ("dualpipe-v", {"nodes": fx.symbolic_trace(lambda x: torch.ops.aten.bernoulli.default(x)).graph.nodes}),
    ],
)
def test_pairs_that_run_one_after_the_other(schedule: Schedule, changes: dict[str, Any]) -> None:
    assert run_at_once(Pipelining("dualpipe-v", 2, 4, 2), **ABLE)
    assert not run_at_once(Pipelining(schedule, 2, 4, 2), **{**ABLE, **changes})
