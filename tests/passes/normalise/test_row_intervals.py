"""The interval of keys that each query sees under a mask, beside the mask itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.normalise.constants import ConstantEvaluator
from autopar.passes.normalise.row_intervals import RowIntervals, row_intervals

COMPARISONS = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq)


def intervals(masks: list[Callable[[], Tensor]], queries: int, keys: int) -> RowIntervals | None:
    evaluator = ConstantEvaluator()
    parts: list[fx.Node] = []
    for mask in masks:
        output = next(node for node in make_fx(mask, tracing_mode="fake")().graph.nodes if node.op == "output")
        assert isinstance(output.args[0], fx.Node)
        parts.append(output.args[0])
    return row_intervals(parts, queries, keys, evaluator)


def dense(found: RowIntervals, keys: int) -> Tensor:
    position = torch.arange(keys)
    return (position >= found.start[:, None]) & (position < found.stop[:, None])


@given(st.data())
def test_agrees_with_every_element_of_the_mask(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))

    def drawn() -> Callable[[], Tensor]:
        compare = data.draw(st.sampled_from(COMPARISONS))
        step, shift = data.draw(st.integers(1, 4)), data.draw(st.integers(-5, 5))
        swapped = data.draw(st.booleans())

        def mask() -> Tensor:
            of_queries = (torch.arange(queries) + shift)[:, None] // step
            of_keys = torch.arange(keys)[None, :] // step
            return compare(of_queries, of_keys) if swapped else compare(of_keys, of_queries)

        return mask

    masks = [drawn() for _ in range(data.draw(st.integers(1, 3)))]
    found = intervals(masks, queries, keys)
    assert found is not None
    assert torch.equal(dense(found, keys), torch.stack([mask() for mask in masks]).all(0))


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.arange(8)[None, :] != torch.arange(8)[:, None],  # all but one
        lambda: torch.arange(8).flip(0)[None, :] <= torch.arange(8)[:, None],  # keys that decrease
        lambda: torch.arange(8)[None, :] + torch.arange(8)[:, None] <= 8,  # neither of rows nor of columns
        lambda: torch.arange(8.0)[None, :] <= torch.arange(8.0)[:, None],  # no integers
        lambda: torch.arange(2)[:, None, None] + torch.arange(8)[None, :] <= torch.arange(8)[:, None],  # varies by row
    ],
)
def test_says_nothing_where_it_does_not_know(mask: Callable[[], Tensor]) -> None:
    assert intervals([mask], 8, 8) is None


def test_a_condition_of_one_value_shows_all_keys_or_none() -> None:
    for mask, stop in ((lambda: torch.full((), True), 8), (lambda: torch.full((), False), 0)):
        found = intervals([mask], 4, 8)
        assert found is not None
        assert found.stop.tolist() == [stop] * 4


def test_full_and_window() -> None:
    found = intervals([lambda: torch.arange(8)[None, :] <= torch.arange(8)[:, None]], 8, 8)
    assert found is not None
    assert not found.is_full(8)
    assert found.is_window(8)
    assert not found.is_window(4)
