"""Linear layers in 8-bit floats against their definition, and against torchao's where it is installed."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.scalings import SCALINGS, Format, Recipe

RECIPES = get_args(Recipe)
# No multiple of 128.
DEPTH = 192
# Names of the recipes there.
TORCHAO = {"fp8-tensor": "tensorwise", "fp8-row": "rowwise"}


def rounded(matrix: Tensor, form: Format, recipe: Recipe, *, weight: bool = False) -> Tensor:
    """A matrix in float64, rounded to what its narrow floats stand for, tile by tile; the last may be shorter."""
    scaling, matrix = SCALINGS[recipe], matrix.double()
    rows, columns = matrix.shape if scaling.reach == "tensor" else (1, matrix.shape[1])
    if scaling.reach == "tile":
        rows, columns = scaling.tile if weight and scaling.square_weights else 1, scaling.tile
    found = torch.empty_like(matrix)
    for row in range(0, matrix.shape[0], rows):
        for column in range(0, matrix.shape[1], columns):
            tile = matrix[row : row + rows, column : column + columns]
            found[row : row + rows, column : column + columns] = rounded_tile(tile, form, recipe)
    return found


def rounded_tile(tile: Tensor, form: Format, recipe: Recipe) -> Tensor:
    scale = (form.limit / tile.abs().amax().clamp(min=1e-12)).float()
    if SCALINGS[recipe].power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    return (tile * scale).clamp(-form.limit, form.limit).to(form.dtype).double() / scale.double()


def operands(dtype: torch.dtype, rows: int = 48) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, rows // 2, DEPTH), (32, DEPTH), (32,), (2, rows // 2, 32))
    x, weight, bias, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x * torch.logspace(-2, 2, DEPTH).to(dtype), weight.requires_grad_(), bias.requires_grad_(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_result_and_gradients_are_products_of_rounded_matrices(
    recipe: Recipe, by_columns: bool, dtype: torch.dtype
) -> None:
    x, weight, bias, grad = operands(dtype)
    x.requires_grad_()
    given = weight.detach().t().contiguous().requires_grad_() if by_columns else weight
    result = scaled_linear(x, given, bias, recipe=recipe, by_columns=by_columns)
    found = torch.autograd.grad(result, (x, given, bias), grad)
    with torch.no_grad():
        value, narrow = SCALINGS[recipe].value, SCALINGS[recipe].gradient
        rows, slope = x.flatten(0, 1), grad.flatten(0, 1)
        wanted = rounded(rows, value, recipe) @ rounded(weight, value, recipe, weight=True).t() + bias.double()
        of_x = rounded(slope, narrow, recipe) @ rounded(weight.t(), value, recipe, weight=True).t()
        of_weight = rounded(slope.t(), narrow, recipe) @ rounded(rows.t(), value, recipe).t()
    assert result.dtype == x.dtype and found[1].dtype == weight.dtype
    # A product in bfloat16 is rounded, and the sum with the bias once more.
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    pairs = ((result, wanted), (found[0], of_x), (found[1].t() if by_columns else found[1], of_weight))
    for own, exact in (*pairs, (found[2], slope.double().sum(0))):
        own = own.detach().double().reshape(exact.shape)
        assert float((own - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_is_that_of_eight_bits(recipe: Recipe) -> None:
    x, weight, bias, _ = operands(torch.float32)
    exact = F.linear(x, weight, bias)
    error = float(((scaled_linear(x, weight, bias, recipe=recipe) - exact).norm() / exact.norm()).detach())
    assert 1e-3 < error < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [0, 2, 14])
def test_any_number_of_rows(recipe: Recipe, rows: int) -> None:
    x, weight, bias, grad = operands(torch.float32, rows=rows)
    x.requires_grad_()
    result = scaled_linear(x, weight, bias, recipe=recipe)
    gradients = torch.autograd.grad(result, (x, weight, bias), grad)
    assert result.shape == (2, rows // 2, 32)
    assert all(torch.isfinite(own).all() for own in gradients)
    if not rows:
        assert not gradients[1].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_what_is_not_finite(recipe: Recipe) -> None:
    x, weight, _, _ = operands(torch.float32)
    assert not scaled_linear(torch.zeros_like(x), weight, recipe=recipe).any()
    x[0, 0, 0] = torch.inf
    assert not torch.isfinite(scaled_linear(x, weight, recipe=recipe)[0, 0]).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", TORCHAO)
def test_agrees_with_torchao(recipe: Recipe, bias: bool) -> None:
    float8 = pytest.importorskip("torchao.float8")
    x, weight, own_bias, grad = operands(torch.bfloat16)
    config = float8.Float8LinearConfig.from_recipe_name(TORCHAO[recipe])
    layer = nn.Linear(DEPTH, 32, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias:
            layer.bias.copy_(own_bias)
    theirs = float8.convert_to_float8_training(nn.Sequential(layer), config=config)
    x.requires_grad_()
    wanted = theirs(x)
    expected = torch.autograd.grad(wanted, (x, theirs[0].weight), grad)
    result = scaled_linear(x, weight, own_bias if bias else None, recipe=recipe)
    found = torch.autograd.grad(result, (x, weight), grad)
    for own, other in ((result, wanted), *zip(found, expected, strict=True)):
        # Their products are in bfloat16, as ours.
        assert float(((own - other).float().norm() / other.float().norm()).detach()) < 1e-6
