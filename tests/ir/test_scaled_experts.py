"""Experts in narrow floats: each is a linear layer of its own."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.ops.scaled_experts import scaled_grouped_linear
from autopar.ir.ops.scaled_products import scaled_product
from autopar.ir.ops.scalings import SCALINGS, Recipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [recipe for recipe in SCALINGS if not SCALINGS[recipe].steps])
def test_each_expert_is_a_linear_layer_of_its_own(recipe: Recipe, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(s, generator=generator).to(dtype) for s in ((40, 64), (3, 32, 64), (40, 32)))
    x.mul_(torch.logspace(-2, 2, 40).to(dtype)[:, None])
    x.requires_grad_()
    weight.requires_grad_()
    ends = torch.tensor([24, 24, 40], dtype=torch.int32)  # the second has no rows
    result = scaled_grouped_linear(x, weight, ends, recipe, (), (), ())
    of_x, of_weight = torch.autograd.grad(result, (x, weight), grad)
    assert not of_weight[1].any()
    for expert, rows in ((0, slice(0, 24)), (2, slice(24, 40))):
        alone = scaled_product(x[rows], weight[expert], recipe, (), (), ())
        wanted = torch.autograd.grad(alone, (x, weight), grad[rows])
        assert torch.equal(result[rows], alone) and torch.equal(of_x[rows], wanted[0][rows])
        if SCALINGS[recipe].reach == "tile":
            plain = grad[rows].t() @ x[rows].detach()
            assert torch.equal(of_weight[expert], plain) and not torch.equal(wanted[1][expert], plain)
        else:
            assert torch.equal(of_weight[expert], wanted[1][expert])


def test_without_rows_there_are_gradients_of_weights() -> None:
    x, weight = torch.zeros(0, 64, requires_grad=True), torch.randn(2, 32, 64, requires_grad=True)
    result = scaled_grouped_linear(x, weight, torch.zeros(2, dtype=torch.int32), "fp8-row", (), (), ())
    of_x, of_weight = torch.autograd.grad(result.sum(), (x, weight))
    assert of_x.shape == (0, 64) and of_weight.shape == weight.shape and not of_weight.any()
