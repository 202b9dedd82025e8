from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from autopar.ir.capture.capture import capture
from autopar.passes.normalise.constants import ConstantEvaluator, TooLarge

B, S = 6, 5


def packed(batch: int, length: int) -> Tensor:
    """The mask of a packed document, as position arithmetic makes it."""
    positions = torch.arange(length).unsqueeze(0).expand(batch, -1)
    first = positions[:, :1] - 1
    document = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(batch)[:, None, None, None]
    q, k = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
    return (document[rows, q] == document[rows, k]) & (positions[rows, k] <= positions[rows, q])


def table(batch: int, length: int) -> Tensor:
    return torch.tril(torch.ones(length, length)).view(1, 1, length, length)[:, :, :length].expand(batch, 2, -1, -1)


def varying(batch: int, length: int) -> Tensor:
    """Another mask in every row of the batch."""
    last = torch.arange(batch).view(batch, 1, 1, 1)
    return (torch.arange(length).view(1, 1, 1, length) <= last).expand(batch, 1, length, length)


def moved(batch: int, length: int) -> Tensor:
    grid = torch.arange(length * batch).view(batch, length)
    return (grid.t()[1:].unsqueeze(1).permute(2, 1, 0) + torch.full((1, length, 1), 2))[:, :, 1:].select(0, 1)


def node_of(make: Callable[[int, int], Tensor], batch: int, length: int) -> fx.Node:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, make(batch, length)

    return capture(Model(), torch.zeros(2)).output_args()[1]  # type: ignore[no-any-return]


NODES = {make: node_of(make, B, S) for make in (packed, table, varying, moved)}


@settings(max_examples=40)
@given(make=st.sampled_from(list(NODES)), data=st.data())
def test_any_box_equals_that_part_of_the_whole(make: Callable[[int, int], Tensor], data: st.DataObject) -> None:
    whole, node = make(B, S), NODES[make]
    box = tuple(
        tuple(sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))))
        for size in whole.shape
    )
    evaluator = ConstantEvaluator()
    assert evaluator.is_constant(node)
    part = evaluator.evaluate(node, box)  # type: ignore[arg-type]
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in box)])
    for dim in evaluator.uniform(node):
        assert torch.equal(whole, whole.narrow(dim, 0, 1).expand(whole.shape))


@pytest.mark.parametrize(("make", "uniform"), [(packed, {0, 1}), (table, {0, 1}), (varying, {1, 2})])
def test_where_a_value_does_not_vary(make: Callable[[int, int], Tensor], uniform: set[int]) -> None:
    assert ConstantEvaluator().uniform(NODES[make]) == uniform


def test_what_depends_on_data_is_not_constant() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.rand(3), x + torch.arange(2)

    captured = capture(Model(), torch.zeros(2))
    assert not any(ConstantEvaluator().is_constant(node) for node in captured.output_args())


def test_one_row_of_a_mask_of_64_gib_takes_no_time() -> None:
    node = node_of(packed, 4096, 4096)
    start = time.process_time()
    row = ConstantEvaluator().evaluate(node, ((7, 8), (0, 1), (100, 101), (0, 4096)))
    assert row.flatten().tolist() == [True] * 101 + [False] * 3995
    assert time.process_time() - start < 5
    with pytest.raises(TooLarge):
        ConstantEvaluator().evaluate(node)
