"""Ops that write have twins that do not; dropout in place is captured as dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.capture.capture import capture
from autopar.ir.capture.functional_twins import functional_twin

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "twin"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.dropout_.default, aten.dropout.default),
        (aten.alpha_dropout_.default, aten.alpha_dropout.default),
        (aten.feature_dropout_.default, aten.feature_dropout.default),
        (aten.masked_fill_.Scalar, aten.masked_fill.Scalar),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.max.dim_max, aten.max.dim),
    ],
)
def test_the_op_with_the_same_operands(target: torch._ops.OpOverload, twin: torch._ops.OpOverload) -> None:
    assert functional_twin(target) is twin


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
def test_dropout_in_place_is_captured(dropout: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), dropout(0.1, inplace=True), nn.Flatten(), nn.Linear(4 * 36, 2))
    captured = capture(model, torch.randn(4, 3, 8, 8), loss_fn=nn.functional.mse_loss, example_target=torch.randn(4, 2))
    called = [str(node.target) for node in captured.graph.nodes]
    assert any("dropout" in name for name in called) and not any("dropout_" in name for name in called), called
