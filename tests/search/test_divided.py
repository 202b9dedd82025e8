"""The share of a model's work that a mesh axis divides, and what it says of ops that stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.report.divided import divided_data, divided_words
from autopar.search.api import estimate_captured
from autopar.search.divided_share import divided_by_axes, divided_flops
from autopar.search.problem.constraints import Constraints

B, S, WIDTH, ODD = 4, 6, 16, 7


class Odd(nn.Module):
    """Two layers whose inner width is even, and two whose widths no axis of two divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, ODD)
        self.first, self.second = nn.Linear(ODD, 3 * ODD), nn.Linear(3 * ODD, ODD)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x)))
        return self.second(F.gelu(self.first(x))).square().mean()


def _captured(model: nn.Module, *inputs: Any) -> CapturedModel:
    return normalise(capture(model, inputs))


def test_what_does_not_divide_is_named_with_its_reason() -> None:
    captured = _captured(Odd(), torch.randn(B, WIDTH))
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(tp=2, precision="fp32")).plan
    found = divided_flops(captured, plan, "tp")
    large, small = WIDTH * 4 * WIDTH + 4 * WIDTH * ODD, 2 * ODD * 3 * ODD
    assert found.divided == 3 * 2 * B * large
    assert found.total == 3 * 2 * B * (large + small)
    (own,) = divided_by_axes(captured, plan)
    assert own.is_degenerate
    assert divided_words(own) == (
        "tp 2 divides 35,328 of 42,384 FLOP; whole on every rank: first/linear (k 7, n 21 not divisible by 2), "
        "second/linear (k 21, n 7 not divisible by 2)"
    )


def test_an_axis_that_divides_all_says_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    x = torch.randn(B, WIDTH)
    captured = normalise(capture(model, (x,), loss_fn=F.mse_loss, example_target=x))
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(tp=2, precision="fp32")).plan
    assert divided_flops(captured, plan, "tp").share == 1.0
    (own,) = divided_by_axes(captured, plan)
    assert not own.is_degenerate
    assert divided_words(own) == "tp 2 divides 49,920 of 49,920 FLOP"
    assert divided_data([own])["tp"]["whole"] == []
    with pytest.raises(KeyError, match="no mesh axis 'ep'"):
        divided_flops(captured, plan, "ep")


def test_groups_of_convolutions_are_divided_after_a_norm_over_all_channels() -> None:
    model = nn.Sequential(
        nn.LayerNorm((WIDTH, S)),
        nn.Conv1d(WIDTH, 4 * WIDTH, 1, groups=4),
        nn.GELU(),
        nn.Conv1d(4 * WIDTH, WIDTH, 1, groups=4),
    )
    x = torch.randn(B, WIDTH, S)
    captured = normalise(capture(model, (x,), loss_fn=F.mse_loss, example_target=x))
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(tp=2, precision="fp32")).plan
    assert divided_flops(captured, plan, "tp").share == 1.0


class Stacked(nn.Module):
    """Every token through every expert, whose matrices are a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(4, B, WIDTH), self.experts).sum(0).square().mean()


def test_stacks_of_matrices_are_experts() -> None:
    captured = _captured(Stacked(), torch.randn(B, WIDTH))
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(ep=2, precision="fp32")).plan
    (own,) = divided_by_axes(captured, plan)
    assert (own.axis, own.divided, own.total) == ("ep", 3 * 2 * 4 * B * WIDTH * WIDTH, 3 * 2 * 4 * B * WIDTH * WIDTH)


def test_a_number_of_matrices_that_does_not_divide_is_told() -> None:
    captured = _captured(Stacked(), torch.randn(B, WIDTH))
    with pytest.raises(InfeasiblePlan, match=r"ep=3 does not divide the 4 experts(.|\n)*--ep 1"):
        estimate_captured(captured, make_cluster("cpu", 3, 3), Constraints(ep=3, precision="fp32"))


def test_a_model_without_experts_says_so() -> None:
    captured = _captured(Odd(), torch.randn(B, WIDTH))
    with pytest.raises(InfeasiblePlan, match="ep=2: Odd has no experts to divide"):
        estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(ep=2, precision="fp32"))
