"""Linear layers in 8-bit floats against their definition, and against torchao's where it is installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.quantise import _rounded, dequantised, quantised
from autopar.ir.ops.scaled_kernels import in_blocks, in_four_bits
from autopar.ir.ops.scalings import E2M1, SCALINGS, Format, Recipe

# Those of the tensors at hand; of earlier steps: test_maxima_history.py.
RECIPES = [recipe for recipe in SCALINGS if not SCALINGS[recipe].steps]
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
            found[row : row + rows, column : column + columns] = rounded_tile(tile, form, recipe, matrix.abs().amax())
    return found


def rounded_tile(tile: Tensor, form: Format, recipe: Recipe, of_tensor: Tensor) -> Tensor:
    scale = (form.limit / tile.abs().amax().clamp(min=1e-12)).float()
    if SCALINGS[recipe].power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    if SCALINGS[recipe].two_levels:
        whole = (of_tensor / 6 / 448).float()
        inverse = (tile.abs().amax().float() / 6 / whole).clamp(2**-6, 448).to(torch.float8_e4m3fn)
        scale = 1 / whole / inverse.float()
    if form.bits == 4:
        places = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        own = (tile * scale).float().double().clamp(-6, 6)
        # Of two that are as near the one at an even place, whose last bit is 0.
        far = (own.abs()[..., None] - places).abs() + 1e-9 * (torch.arange(8) % 2)
        nearest = places[far.argmin(-1)]
        return nearest.copysign(own) / scale.double()
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
    assert 1e-3 < error < (0.2 if SCALINGS[recipe].value.bits == 4 else 0.05)


def test_four_bits_round_to_the_even_one_of_two_as_near() -> None:
    scaled = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -6.0, 7.0, 0.2, 2.2, 4.9]])
    found = _rounded(scaled, E2M1).float()
    assert found.tolist() == [[0, 1, 1, 2, 2, 4, 4, 6, -0.0, -1, -4, -6, 6, 0, 2, 4]]


def test_order_of_scales_is_the_one_of_cublas() -> None:
    scales = (torch.arange(200 * 6).reshape(200, 6) % 251).to(torch.uint8)
    found = in_blocks(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert found.numel() == 256 * 8
    for row, column in ((0, 0), (31, 3), (32, 1), (127, 5), (128, 4), (199, 5)):
        block = row // 128 * 2 + column // 4
        place = 512 * block + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert found[place] == scales[row, column]


def test_two_numbers_of_four_bits_in_a_byte() -> None:
    values = torch.tensor([[0.5, -6.0, 1.5, 4.0]]).to(torch.float8_e4m3fn)
    assert in_four_bits(values).view(torch.uint8).tolist() == [[0xF1, 0x63]]


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


def test_tiles_are_those_of_torchao() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    x, *_ = operands(torch.bfloat16)
    rows = x.flatten(0, 1).contiguous()
    theirs = mx.MXTensor.to_mx(
        rows, torch.float8_e4m3fn, block_size=32, scaling_mode=config.ScaleCalculationMode.RCEIL
    ).dequantize(torch.float32)
    ours = quantised(rows, None, SCALINGS["mxfp8"].value, SCALINGS["mxfp8"], weight=False)
    assert torch.equal(dequantised(ours, torch.float32), theirs)


def test_four_bits_are_those_of_torchao() -> None:
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x, *_ = operands(torch.bfloat16)
    rows = x.flatten(0, 1).contiguous()
    largest = rows.abs().amax().float()
    scale = nv.per_tensor_amax_to_scale(largest)
    theirs = nv.NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=scale).dequantize(torch.float32)
    ours = quantised(rows, largest, E2M1, SCALINGS["nvfp4"], weight=False)
    assert torch.equal(dequantised(ours, torch.float32), theirs)


def test_blocks_are_those_of_torchao() -> None:
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(256, 384, generator=generator).to(torch.bfloat16)
    scaling = SCALINGS["fp8-block"]
    ours = quantised(rows, None, scaling.value, scaling, weight=False)
    values, inverse = kernels.torch_blockwise_scale_act_quant_lhs(rows)
    assert torch.equal(ours.values.float(), values.float()) and torch.equal(ours.inverse, inverse)
    square = quantised(rows, None, scaling.value, scaling, weight=True)
    values, inverse = kernels.torch_blockwise_scale_weight_quant(rows)
    assert torch.equal(square.values.float(), values.float()) and torch.equal(square.inverse, inverse)
