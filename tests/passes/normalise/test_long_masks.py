"""Masks of long sequences: what they mean is found in a number of elements that does not grow with their square."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.normalise.constants import Box, ConstantEvaluator
from autopar.passes.normalise.masks import MaskReader

LONG = 1 << 20


def positions(length: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(length)
    return place[:, None], place[None, :]


def causal(length: int) -> Tensor:
    rows, columns = positions(length)
    return columns <= rows


def sliding(length: int) -> Tensor:
    rows, columns = positions(length)
    return (columns <= rows) & (columns > rows - 4096)


def chunked(length: int) -> Tensor:
    """Attention within chunks of 8192, as some models have it."""
    rows, columns = positions(length)
    return (columns <= rows) & (columns // 8192 == rows // 8192)


def one_row_sees_all(length: int) -> Tensor:
    rows, columns = positions(length)
    return (columns <= rows) | (rows == 333_333)


def one_row_sees_none_of_the_past(length: int) -> Tensor:
    rows, columns = positions(length)
    return (columns <= rows) & ((rows != 333_333) | (columns == rows))


class Counting(ConstantEvaluator):
    """Counts the elements that it computes."""

    numel = 0

    def evaluate(self, node: fx.Node, box: Box | None = None) -> Tensor:
        value = ConstantEvaluator.evaluate(self, node, box)
        Counting.numel += value.numel()
        return value


def read(mask: Callable[[int], Tensor], length: int) -> tuple[tuple[str, int | None], int, int]:
    """Kind and window; elements computed; bytes that are remembered."""
    graph = make_fx(lambda: mask(length), tracing_mode="fake")().graph
    Counting.numel, evaluator = 0, Counting()
    made = next(node for node in graph.nodes if node.op == "output").args[0]
    meaning = MaskReader(evaluator).read(made, queries=length, keys=length)
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in evaluator._values.values()
    }
    return (meaning.kind, meaning.window), Counting.numel, sum(held.values())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal, ("causal", None)),
        (sliding, ("sliding", 4096)),
        (chunked, ("mask", None)),
        pytest.param(one_row_sees_all, ("mask", None), marks=pytest.mark.slow),
        (one_row_sees_none_of_the_past, ("mask", None)),
    ],
)
def test_a_mask_of_a_million_positions(mask: Callable[[int], Tensor], expected: tuple[str, int | None]) -> None:
    found, numel, num_bytes = read(mask, LONG)
    assert found == expected
    assert num_bytes < 16 << 20, "rows of a mask are views of what they are cut from"
    assert numel < 1e9


def of_differences(length: int) -> Tensor:
    """Causal, but only its elements say so."""
    rows, columns = positions(length)
    return columns - rows <= 0


def test_a_longer_mask_takes_no_more_elements() -> None:
    (kind, _), short, _ = read(of_differences, LONG // 8)
    assert kind == "causal"
    _, long, _ = read(of_differences, LONG)
    assert long < 1.2 * short


def test_intervals_take_elements_as_the_length() -> None:
    _, numel, _ = read(causal, LONG)
    assert numel < 8 * LONG
