"""Checks of values in Python pass while a model is traced; other uses of a value are refused.

pytest would rewrite the assertions of the models: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError


class Called(nn.Module):
    """A linear layer of what a function makes of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function[0](x)).sum()


def asserted(x: Tensor) -> Tensor:
    assert torch.all(x > -9).item(), "too small"
    assert (x > -9).all() and not (x < -9).any()
    assert not (
        (x < -9).any()
        or x.isnan()
        .any()
        .item()
    )  # fmt: skip
    assert -100 < x.min().item() < 100 or x.max() > 3
    return x


def raised(x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("not a number")
    if not x.isfinite().all():
        name = "x"
        raise ValueError(name)
    if (x > 10).any().item() or (x < -10).any():
        raise ValueError
    if (x < 9).all():
        return x + 1
    else:
        raise ValueError


def branch(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def branch_that_may_raise(x: Tensor) -> Tensor:
    if x.sum() > 0:
        if x.shape[0] == 8:
            return x + 1
        raise ValueError
    return x


def branch_inside(x: Tensor) -> Tensor:
    assert (x + 1 if x.sum() > 0 else x).shape[0] == 8
    return x


def caught(x: Tensor) -> Tensor:
    try:
        asserted(x)
    except AssertionError:
        return x + 1
    return x


@pytest.mark.parametrize(("function", "ops"), [(asserted, ["linear", "sum"]), (raised, ["add", "linear", "sum"])])
def test_checks_compute_nothing(function: Callable[[Tensor], Tensor], ops: list[str]) -> None:
    graph = capture(Called(function), torch.randn(8, 4)).graph
    assert [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"] == ops


@pytest.mark.parametrize("function", [branch, branch_that_may_raise, branch_inside, caught])
def test_other_branches_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Called(function), torch.randn(8, 4))
