"""Convolutions.

conv2d            b c y0 y1, o c k0 k1, o -> b o y2 y3     c is summed (lowered with a bias), space is blocked
conv2d, groups    b (g c) .., (g o) c .., (g o) -> b (g o) ..     divided by groups alone
patches           b c (y k) (x l), o c k l, o -> b o y x   a kernel as large as its stride keeps space shardable
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, numel, operand_factors, sums, table


def convolution(call: Call) -> FactorRule | None:
    """A plain or transposed convolution of any spatial rank; None without a batch dimension."""
    bound = call.bound()
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    groups = bound["groups"]
    transposed = bound.get("transposed", "conv_transpose" in call.name)
    rank = len(weight.shape) - 2
    out = call.results[0].shape
    if len(x.shape) != rank + 2:
        return None  # no batch dimension
    factors = Factors()
    b = factors.dim("b", x.shape[0])
    g = factors.dim("g", groups)
    c, o = factors.dim("c", x.shape[1] // groups), factors.dim("o", out[1] // groups)
    channels_in: DimFactors = g + c
    channels_out: DimFactors = g + o
    space_in, space_out, kernel = _space(factors, call, x.shape[2:], weight.shape[2:], out[2:], transposed)
    # A transposed convolution stores (in, out / groups), a plain one (out, in / groups).
    leading = (channels_in, o) if transposed else (channels_out, c)
    known: dict[int, TensorFactors] = {
        x.position: (b, channels_in, *space_in),
        weight.position: (*leading, *kernel),
    }
    if isinstance(bias, Operand):
        known[bias.position] = (channels_out,)
    work = numel(out) * (x.shape[1] // groups) * numel(weight.shape[2:])
    if transposed:
        work = numel(x.shape) * (out[1] // groups) * numel(weight.shape[2:])
    rule = factors.rule(
        operand_factors(call, known, factors),
        [(b, channels_out, *space_out)],
        summed=("c",),
        lowered={"c": "bias"} if bias is not None else None,
        linear=sums(call, [x.position], [weight.position]) if bias is None else (),
        flops=2 * work,
    )
    # A product for each group, which is worth dividing where the operand comes whole. One channel each is none.
    return replace(rule, leads=bool(g) and bool(c or o))


def _space(
    factors: Factors,
    call: Call,
    before: tuple[int, ...],
    kernel: tuple[int, ...],
    after: tuple[int, ...],
    transposed: bool,
) -> tuple[TensorFactors, TensorFactors, TensorFactors]:
    """Factors of the spatial dimensions of input, result and weight."""
    bound = call.bound()
    rank = len(kernel)
    stride, padding, dilation = (_each(bound[name], rank) for name in ("stride", "padding", "dilation"))
    space_in: list[DimFactors] = []
    space_out: list[DimFactors] = []
    taps: list[DimFactors] = []
    for n in range(rank):
        separate = (
            not transposed
            and stride is not None
            and padding is not None
            and dilation is not None
            and stride[n] == kernel[n]
            and padding[n] == 0
            and (dilation[n] == 1 or kernel[n] == 1)
            and before[n] == after[n] * kernel[n]
        )
        tap = factors.dim(f"k{n}", kernel[n], block=True)
        taps.append(tap)
        if separate:
            y = factors.dim(f"y{n}", after[n])
            space_in.append(y + tap)
            space_out.append(y)
        else:
            space_in.append(factors.fresh(before[n]))
            space_out.append(factors.fresh(after[n]))
    return tuple(space_in), tuple(space_out), tuple(taps)


def _each(value: object, rank: int) -> tuple[int, ...] | None:
    """One number per spatial dimension; None if it is a word such as "same"."""
    if isinstance(value, int):
        return (value,) * rank
    if isinstance(value, tuple):
        return value * rank if len(value) == 1 else value
    return None


def pool(call: Call) -> FactorRule | None:
    """Pooling and interpolation: batch and channels are factors, space is blocked.

    Tensors of rank 3 or 4 alike: the window has as many dimensions as the op's name says, or as its size.
    """
    bound = call.bound()
    x = call.operands[0]
    rank = _pooled(call.name)
    if len(call.operands) != 1 or rank is None or not isinstance(bound.get("self", bound.get("input")), Operand):
        return None
    lead = len(x.shape) - rank
    factors = Factors()
    names = ["b", "c"][-lead:] if lead <= 2 else [f"d{n}" for n in range(lead)]
    dims = factors.dims(names, x.shape[:lead])
    operand = (*dims, *factors.whole(x.shape[lead:]))
    results: list[TensorFactors] = [(*dims, *factors.whole(result.shape[lead:])) for result in call.results]
    linear = sums(call, [0]) if "max" not in call.name else ()
    return factors.rule([operand], results, linear=linear, flops=numel(x.shape) + numel(call.results[0].shape))


def _pooled(name: str) -> int | None:
    for rank in (1, 2, 3):
        if f"{rank}d" in name:
            return rank
    return None


def pixel_shuffle(call: Call) -> FactorRule | None:
    """(c r0 r1) y x -> c (y r0) (x r1), and back."""
    (x,) = call.operands
    bound = call.bound()
    down = "upscale_factor" not in bound
    ratio = bound["downscale_factor"] if down else bound["upscale_factor"]
    deep, wide = (call.results[0].shape, x.shape) if down else (x.shape, call.results[0].shape)
    factors = Factors()
    lead = tuple(factors.dim(f"d{n}", s) for n, s in enumerate(deep[:-3]))
    c, y, w = factors.dim("c", wide[-3]), factors.dim("y", deep[-2]), factors.dim("x", deep[-1])
    r0, r1 = factors.dim("r0", ratio), factors.dim("r1", ratio)
    shapes = [(*lead, c + r0 + r1, y, w), (*lead, c, y + r0, w + r1)]
    if down:
        shapes.reverse()
    return factors.rule(shapes[:1], shapes[1:], linear=sums(call, [0]))


RULES: dict[str, Rule] = table(
    convolution,
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d",
)
RULES.update(
    table(
        pool,
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    )
)
RULES.update({"aten::pixel_shuffle": pixel_shuffle, "aten::pixel_unshuffle": pixel_shuffle})
