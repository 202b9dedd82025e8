"""Matrix products by shape, attention, memory traffic, functions of elements, an optimiser step and the floor of
a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from autopar.cost_model.communication.gradient_sync import ADAMW_BYTES
from autopar.cost_model.hardware.functions import ElementTime, FunctionName
from autopar.ir.ops.biased_attention import masked_attention
from autopar.profiling.clock import Clock
from autopar.profiling.samples import AttentionRun, Product, Samples, Traffic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Rows, columns and depth: square, thin in each dimension in turn, and uneven; of a GPU, and of a core.
_GPU_PRODUCTS = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
    *((8192, thin, 4096) for thin in (128, 256, 512, 1024)),
    *((8192, 4096, thin) for thin in (64, 128, 256, 1024)),
    *((thin, 4096, 4096) for thin in (64, 256, 1024)),
    (4096, 4000, 4096),
    (16384, 11008, 4096),
)
_CPU_PRODUCTS = (
    *((size, size, size) for size in (64, 128, 256, 512, 1024)),
    *((1024, thin, 256) for thin in (16, 64, 128)),
    *((1024, 256, thin) for thin in (16, 64, 128)),
    *((thin, 256, 256) for thin in (16, 64)),
    (512, 300, 256),
    (2048, 1024, 256),
    (1024, 3072, 768),
    (2048, 2048, 1024),
)


# Of attention. A core takes most time for a score of few, and documents that are packed into rows may be short.
_GPU_LENGTHS, _CPU_LENGTHS = (2048, 8192), (32, 64, 128, 256, 512, 1024, 4096)

# Of tensors whose elements are multiplied or normalised. A core's caches hold the small ones.
_GPU_MIB, _CPU_MIB = (64, 256, 1024), (0.25, 1, 4, 16)

# Of the products there are many, and their rate is the median. Each of the other figures is of one measurement, which
# takes so many times as long.
_LONGER = 3

# Operands of a product or a function that are used in turn.
_CACHE_BYTES, _MOST_COPIES = 64 << 20, 16

_FUNCTIONS: Mapping[FunctionName, Callable[[Tensor], Tensor]] = {
    "cos": torch.cos,
    "elu": functional.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "log": torch.log,
    "log_softmax": partial(functional.log_softmax, dim=-1),
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "softmax": partial(functional.softmax, dim=-1),
    "softplus": functional.softplus,
    "tanh": torch.tanh,
    # Of so many positions of four bytes: channels are 4,032, 1,024 and 4,096 bytes apart.
    "transposed": lambda x: _transposed(x, 1008),
    "transposed_1024": lambda x: _transposed(x, 256),
    "transposed_4096": lambda x: _transposed(x, 1024),
}

# Elements of a row that are few beside what a norm takes for the row.
_NARROW = 16

# That an optimiser has.
_PARAMETERS = 16

# Of attention with and without a mask or dropout, which are compared side by side.
_ROUNDS = 9


def measure_compute(
    samples: Samples, clock: Clock, precisions: tuple[str, ...], progress: Callable[[str], object]
) -> None:
    """Adds to ``samples`` what every rank's device does by itself, all of them at once."""
    gpu, lone = clock.device.type == "cuda", replace(clock, seconds=_LONGER * clock.seconds)
    shapes = _GPU_PRODUCTS if gpu else _CPU_PRODUCTS
    for precision in (name for name in precisions if name in DTYPES):  # 8-bit floats are left at the catalogue's rates
        dtype = DTYPES[precision]
        for number, (rows, columns, depth) in enumerate(shapes):
            progress(f"matrix products in {precision}, {number + 1} of {len(shapes)}")
            made = _Operands.of(rows, columns, depth, dtype, clock.device)
            for run, shape in (
                (made.forward, (rows, columns, depth)),
                (made.to_inputs, (rows, depth, columns)),
                (made.to_weights, (columns, depth, rows)),
            ):
                samples.products.append(Product(precision, *shape, clock.time(run)))
        progress(f"attention in {precision}")
        for length in _GPU_LENGTHS if gpu else _CPU_LENGTHS:
            samples.attention.append(_attention(lone, precision, heads=16 if gpu else 4, length=length))
    progress("memory traffic")
    for mib in _GPU_MIB if gpu else _CPU_MIB:
        x = torch.ones(int(mib * (1 << 18)), device=clock.device)
        if gpu:
            out = torch.empty_like(x)
            samples.traffic.append(Traffic(2 * x.nbytes, lone.time(partial(torch.add, x, 1.0, out=out))))
        else:
            samples.traffic.append(_multiplied(lone, x))
        samples.traffic.append(_normalised(lone, x.view(-1, 256)))
    samples.optimizer.append(_optimised(lone))
    samples.launch_s = _floor(lone)
    if not gpu:
        progress("functions of elements")
        samples.functions |= {name: _function(clock, taken) for name, taken in _FUNCTIONS.items()}
        samples.functions |= _norm(clock, lone)
        progress("attention with a mask and with dropout")
        samples.functions |= _around_attention(clock)


@dataclass(slots=True)
class _Operands:
    """Inputs, weights and gradients of a linear layer, so many of them that no cache has the next ones."""

    several: list[tuple[Tensor, Tensor, Tensor]]
    calls: int = 0

    @classmethod
    def of(cls, rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> _Operands:
        sizes = (rows, depth), (columns, depth), (rows, columns)
        num_bytes = dtype.itemsize * sum(first * second for first, second in sizes)
        count = max(1, min(_MOST_COPIES, _CACHE_BYTES // num_bytes))
        made = [[torch.randn(size, device=device).to(dtype) for size in sizes] for _ in range(count)]
        return cls([(x, w, grad) for x, w, grad in made])

    def _next(self) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        return self.several[self.calls % len(self.several)]

    def forward(self) -> Tensor:
        x, w, _ = self._next()
        return functional.linear(x, w)

    def to_inputs(self) -> Tensor:
        _, w, grad = self._next()
        return grad @ w

    def to_weights(self) -> Tensor:
        x, _, grad = self._next()
        return grad.t() @ x


def _multiplied(clock: Clock, x: Tensor, count: int = 8) -> Traffic:
    """Products of tensors like ``x`` one after the other, forward and backward; each reads or writes nine of them.

    Every result has memory that no cache knows, as in training, and is kept for the backward: a core takes up to twice
    as long for a byte as where one operand is read and one result is overwritten all the time.
    """
    factors = [torch.randn_like(x).requires_grad_() for _ in range(count + 1)]
    grad = torch.ones_like(x)

    def run() -> None:
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        torch.autograd.grad(product, factors, grad)

    return Traffic(9 * count * x.nbytes, clock.time(run), 3 * count)


def _normalised(clock: Clock, x: Tensor) -> Traffic:
    """A layer norm of the rows of ``x``, which reads and writes five tensors of its size forward and backward."""
    x = torch.randn_like(x).requires_grad_()
    weight, bias = (torch.ones(x.shape[1], device=x.device, requires_grad=True) for _ in range(2))
    grad = torch.ones_like(x)

    def run() -> None:
        out = functional.layer_norm(x, weight.shape, weight, bias)
        torch.autograd.grad(out, (x, weight, bias), grad)

    return Traffic(5 * x.nbytes, clock.time(run), 2)


def _optimised(clock: Clock) -> Traffic:
    """A fused AdamW step over several tensors, as of a model."""
    numel = 1 << (24 if clock.device.type == "cuda" else 18)
    parameters = [torch.ones(numel, device=clock.device, requires_grad=True) for _ in range(_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return Traffic(ADAMW_BYTES * numel * _PARAMETERS, clock.time(optimizer.step))


def _function(clock: Clock, taken: Callable[[Tensor], Tensor]) -> ElementTime:
    """Seconds of an element that a function is taken of, in tensors as large as a layer's which no cache has: alone,
    and its gradient."""
    shape = 1 << 12, 1 << 9
    each = cycle([torch.rand(shape, device=clock.device) + 0.5 for _ in range(_CACHE_BYTES // (4 * prod(shape)))])
    grad = torch.ones_like(taken(next(each)))

    def both() -> None:
        x = next(each).detach().requires_grad_()
        torch.autograd.grad(taken(x), x, grad)

    forward_s, both_s = clock.time(lambda: taken(next(each))), clock.time(both)
    return ElementTime(forward_s / grad.numel(), max(0.0, both_s - forward_s) / grad.numel())


def _norm(clock: Clock, lone: Clock, count: int = 8, width: int = 768) -> dict[FunctionName, ElementTime]:
    """Seconds of an element of a layer norm, and of a row of it, by rows of a model's width and by narrow ones.

    As of products of elements, each result has memory that no cache knows and is kept for the backward.
    """
    several = [torch.randn(1 << 10, width, device=clock.device, requires_grad=True) for _ in range(count)]
    scales = [torch.ones(width, device=clock.device, requires_grad=True) for _ in range(2 * count)]
    grad = torch.ones_like(several[0])

    def run() -> list[Tensor]:
        pairs = zip(scales[:count], scales[count:], strict=True)
        return [functional.layer_norm(x, (width,), *own) for x, own in zip(several, pairs, strict=True)]

    def both() -> None:
        torch.autograd.grad(run(), several + scales, [grad] * count)

    forward_s, both_s = lone.time(run), lone.time(both)
    whole = (one * width / (count * grad.numel()) for one in (forward_s, both_s - forward_s))
    narrow = (one * _NARROW for one in _function(clock, _narrow_rows))
    element, row = [], []
    for wide_s, narrow_s in zip(whole, narrow, strict=True):
        element.append(max(0.0, wide_s - narrow_s) / (width - _NARROW))
        row.append(max(0.0, narrow_s - _NARROW * element[-1]))
    return {"layer_norm": ElementTime(*element), "normalised_row": ElementTime(*row)}


def _narrow_rows(x: Tensor) -> Tensor:
    """A layer norm that has more rows than elements in one of them."""
    return functional.layer_norm(x.view(-1, _NARROW), (_NARROW,))


def _transposed(x: Tensor, positions: int, channels: int = 256) -> Tensor:
    """A copy of the largest part of ``x`` that is images of so many positions, with their channels last."""
    images = x.numel() // (channels * positions)
    whole = x.reshape(-1)[: images * channels * positions].view(images, channels, positions)
    return whole.transpose(1, 2).contiguous()


def _floor(clock: Clock, count: int = 100) -> float:
    """Seconds of one of many small kernels, half of them forward and half backward, as autograd issues them."""
    x = torch.ones(16, device=clock.device, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(count):
            y = y * 1.5
        torch.autograd.grad(y, x, torch.ones_like(y))

    return clock.time(run) / (2 * count)


def _attention(clock: Clock, precision: str, *, heads: int, length: int) -> AttentionRun:
    width = 128 if clock.device.type == "cuda" else 64
    q, k, v = (
        torch.randn(1, heads, length, width, device=clock.device).to(DTYPES[precision]).requires_grad_()
        for _ in range(3)
    )

    def run() -> None:
        out: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    # Two products forward, five backward, of half of the scores.
    flops = 7 * 2 * heads * length * length * width / 2
    return AttentionRun(precision, flops, clock.time(run), length)


def _around_attention(clock: Clock) -> dict[FunctionName, ElementTime]:
    """Seconds of a score that attention takes longer with a mask that needs a gradient, and with dropout: of queries,
    keys and values as large as a layer's."""
    q, k, v, grad = (torch.randn(2, 12, 256, 64, device=clock.device) for _ in range(4))
    bias = torch.randn(1, 12, 256, 256, device=clock.device)
    operands = [x.requires_grad_() for x in (q, k, v, bias)]

    def attention(mask: Tensor | None, dropout_p: float) -> Tensor:
        return masked_attention(q, k, v, mask, scale=0.125, dropout_p=dropout_p)

    def both(mask: Tensor | None, dropout_p: float) -> None:
        torch.autograd.grad(attention(mask, dropout_p), operands[: 3 if mask is None else 4], grad)

    forms = ((None, 0.0), (bias, 0.0), (None, 0.1))
    runs = [partial(run, *form) for form in forms for run in (attention, both)]
    forward, whole, *others = clock.in_turn(*runs, rounds=_ROUNDS)
    scores = q.shape[0] * bias.numel()
    names: tuple[FunctionName, ...] = "biased_score", "dropped_score"
    found = {}
    for name, own, own_whole in zip(names, others[::2], others[1::2], strict=True):
        longer = own - forward, (own_whole - own) - (whole - forward)
        found[name] = ElementTime(*(max(0.0, seconds) / scores for seconds in longer))
    return found
