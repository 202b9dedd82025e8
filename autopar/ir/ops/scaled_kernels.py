"""The product of two operands in narrow floats, by a kernel of the device where there is one.

``torch.nn.functional.scaled_mm`` takes scales by tensor and by row on CPUs and GPUs, by tiles of 128 on GPUs of compute
capability 9, by tiles of 32 and 16 on those of 10, in the order in memory that cuBLAS wants ("Scaling factors layouts"
of its manual). Everywhere else the product is of what the operands stand for, in float32. A kernel for tiles is trusted
on a device once it has agreed with that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops.quantise import Quantised, dequantised

# Bytes that a GPU reads at once along the dimension that is summed, and so numbers of 8 bits.
_AT_ONCE = 16
# The first devices with products of these 8-bit floats: NVIDIA's Ada, AMD's CDNA 4 (CDNA 3 has others).
_CAPABILITY = (9, 5) if torch.version.hip else (8, 9)
# Compute capability, major number, of the GPUs with a kernel for tiles of so many numbers.
_CAPABLE_OF_TILES = {128: 9, 32: 10, 16: 10}
# Largest error of a kernel that is right, which sums in another order, against the product in float32.
_TOLERANCE = 1e-2


def product(first: Quantised, second: Quantised, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """(r, c) of (r, d) and (c, d). fast: partial sums may have fewer digits than float32, where a device does so."""
    if first.tile is not None:
        sizes = first.values.shape[0] % _AT_ONCE, second.values.shape[0] % _AT_ONCE
        tiles = first.tile, _tile_of(second)
        if dtype == torch.bfloat16 and not any(sizes) and _multiplies_tiles(first.values.device, *tiles, first.bits):
            return _of_tiles(first, second, dtype)
    elif _has_units(first.values.device, dtype, by_row=first.inverse.dim() > 0):
        kind = F.ScalingType.RowWise if first.inverse.dim() else F.ScalingType.TensorWise
        a, b = (_padded(own.values) for own in (first, second))
        inverse = second.inverse.t() if second.inverse.dim() else second.inverse
        return F.scaled_mm(a, b.t(), first.inverse, kind, inverse, kind, output_dtype=dtype, use_fast_accum=fast)
    return reference_product(first, second, torch.promote_types(dtype, torch.float32)).to(dtype)


def reference_product(first: Quantised, second: Quantised, dtype: torch.dtype) -> Tensor:
    """The product in ``dtype`` of what the operands stand for, as every device has it."""
    return dequantised(first, dtype) @ dequantised(second, dtype).t()


def _has_units(device: torch.device, dtype: torch.dtype, *, by_row: bool) -> bool:
    """Whether ``F.scaled_mm`` runs on a device, for a result of a dtype. By row GPUs write bfloat16 alone."""
    if device.type != "cuda":
        return device.type == "cpu" and dtype != torch.float64 and _ON_CPU
    capable = torch.cuda.get_device_capability(device) >= _CAPABILITY
    return capable and (dtype == torch.bfloat16 or not by_row)


def _runs_on_cpu() -> bool:
    """Whether this torch has the product for CPUs: 2.11 has not."""
    eight, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    kind = F.ScalingType.TensorWise
    try:
        F.scaled_mm(eight, eight.t(), one, kind, one, kind, output_dtype=torch.float32)
    except NotImplementedError:  # what torch raises where a device has no kernel for an op
        return False
    return True


_ON_CPU = _runs_on_cpu()


def _padded(values: Tensor, multiple: int = _AT_ONCE) -> Tensor:
    """With zeros up to a multiple of what a GPU reads at once along the dimension that is summed."""
    missing = -values.shape[1] % multiple
    if not missing or values.device.type != "cuda":
        return values
    padded = values.new_zeros(values.shape[0], values.shape[1] + missing)
    padded[:, : values.shape[1]] = values
    return padded


def _tile_of(operand: Quantised) -> tuple[int, int]:
    assert operand.tile is not None, "both operands of a product are scaled alike"
    return operand.tile


def _of_tiles(first: Quantised, second: Quantised, dtype: torch.dtype) -> Tensor:
    if _tile_of(first)[1] < 128:
        return _of_small_tiles(first, second, dtype)
    kinds, inverses = zip(*(_kind_and_scales(own) for own in (first, second)), strict=True)
    a, b = (_padded(own.values) for own in (first, second))
    return F.scaled_mm(a, b.t(), inverses[0], kinds[0], inverses[1].t(), kinds[1], output_dtype=dtype)


def _kind_and_scales(operand: Quantised) -> tuple[Any, Tensor]:
    """The kind of tiles of 128, and their inverse scales as cuBLAS reads them: those of 1 x 128 with neighbouring rows
    next to each other, those of 128 x 128 with 4 tiles of a row at once."""
    if _tile_of(operand)[0] == 1:
        return F.ScalingType.BlockWise1x128, operand.inverse.t().contiguous().t()
    missing = -operand.inverse.shape[1] % 4
    inverse = F.pad(operand.inverse, (0, missing), value=1.0) if missing else operand.inverse
    return F.ScalingType.BlockWise128x128, inverse.contiguous()


def _of_small_tiles(first: Quantised, second: Quantised, dtype: torch.dtype) -> Tensor:
    values, scales = [], []
    for own in (first, second):
        rows, depth = _tile_of(own)
        inverse = own.inverse.repeat_interleave(rows, 0)[: own.values.shape[0]]
        scales.append([in_blocks(inverse.to(torch.float8_e8m0fnu if depth == 32 else torch.float8_e4m3fn))])
        scales[-1] += [] if own.whole is None else [own.whole]
        wide = _padded(own.values, 32)
        values.append(in_four_bits(wide) if own.bits == 4 else wide)
    kinds, orders = [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]
    if first.whole is not None:
        kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        orders += [F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(values[0], values[1].t(), scales[0], kinds, scales[1], kinds, orders, orders, output_dtype=dtype)


def in_blocks(scales: Tensor) -> Tensor:
    """Scales (r, tiles) of 8 bits in the order of cuBLAS: 128 x 4 at a time, of these rows 0, 32, 64 and 96 first."""
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1).view(scales.dtype)


def in_four_bits(values: Tensor) -> Tensor:
    """Numbers of E2M1 (r, d), two in a byte, the first in its lower half: (r, d / 2)."""
    wide = values.float()
    places = wide.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (torch.searchsorted(places, wide.abs()) + 8 * wide.signbit()).to(torch.uint8)
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).view(torch.float4_e2m1fn_x2)


@cache
def _multiplies_tiles(device: torch.device, first: tuple[int, int], second: tuple[int, int], bits: int) -> bool:
    """Whether a device has a kernel for tiles of two operands, which gives what the reference does."""
    if device.type != "cuda" or torch.version.hip:
        return False
    if torch.cuda.get_device_capability(device)[0] != _CAPABLE_OF_TILES[first[1]]:
        return False
    operands = []
    for tile in (first, second):
        size = (256, 640)
        numbers = torch.arange(size[0] * size[1], device=device).reshape(size)
        # All that four bits have, with powers of two as scales, which every recipe has.
        places = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -2.0, -6.0, 3.0], device=device)
        values = places[numbers * 37 % 13].to(torch.float8_e4m3fn)
        tiles = [-(-own // part) for own, part in zip(size, tile, strict=True)]
        inverse = torch.exp2((torch.arange(tiles[0] * tiles[1], device=device).reshape(tiles) % 7).float())
        whole = torch.full((), 0.5, device=device) if bits == 4 else None
        operands.append(Quantised(values, inverse, tile, whole, bits))
    try:
        found = _of_tiles(operands[0], operands[1], torch.bfloat16).float()
    except (RuntimeError, NotImplementedError):  # what torch raises for a kernel that a build or a device lacks
        return False
    wanted = reference_product(operands[0], operands[1], torch.float32)
    return bool((found - wanted).norm() <= _TOLERANCE * wanted.norm())
