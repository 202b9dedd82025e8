"""Attention with a mask, on a CPU also where the mask is a bias that needs a gradient, or one beside a causal mask.

No kernel for CPUs gives the gradient of a bias, and without a kernel autograd keeps the scores of all heads,
(B, H, S, T). Here the forward is the kernel, which keeps the logarithm of the normaliser of each row instead, and the
backward makes the scores again, in tiles (Dao, arXiv:2307.08691, section 3). The kernel also takes a causal mask beside
another one, which the public function has to be given as one mask of all queries and keys.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops.flash_cpu import flash_forward
from autopar.ir.primitives.values import has_values

# Queries, and keys, of a tile. A core took 0.5 to 0.85 of the time of tiles of 1,024 for 1,024 and 2,048 keys (12
# heads, 1 to 4 rows), and as long for 128 to 512, but for 0.7 of 512 under a causal mask.
TILE = 256


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False, scale: float, dropout_p: float
) -> Tensor:
    """``scaled_dot_product_attention`` of equally many heads of queries and keys: q (B, H, S, D), k (B, H, T, D),
    v (B, H, T, Dv) and a mask that broadcasts to (B, H, S, T) give (B, H, S, Dv). causal: beside the mask, where
    ``takes_causal``."""
    if mask is not None and takes_causal(q, k, v, mask, dropout_p):
        if mask.requires_grad and torch.is_grad_enabled():
            found: Tensor = _BiasedAttention.apply(q, k, v, mask, causal, scale)  # type: ignore[no-untyped-call]
            return found
        if causal:
            return flash_forward(q, k, v, _added(mask, q.dtype), causal=True, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)


def takes_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """Whether the kernel of CPUs computes this attention, also under a causal mask beside ``mask``, so that no mask of
    all queries and keys is made."""
    if mask is None or mask.dim() not in (2, 4) or torch.compiler.is_compiling():
        return False
    fits = q.shape[3] == v.shape[3] and dropout_p == 0 and q.shape[2] > 0 and k.shape[2] > 0
    return q.device.type == "cpu" and fits and has_values(q)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class TileGradients(NamedTuple):
    """What a tile of scores adds to the gradients of its queries, keys, values and scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor


def tile_gradients(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad: Tensor, out: Tensor, scale: float
) -> TileGradients:
    """Backward of a tile. weights: of its queries and keys, (.., rows, columns), normalised over all keys. grad, out:
    of its queries, over all keys."""
    spread = (grad * out).sum(-1, keepdim=True)
    slope = (grad @ v.mT).sub_(spread).mul_(weights)
    return TileGradients(slope @ k * scale, slope.mT @ q * scale, weights.mT @ grad, slope)


def part_of(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of a mask, broadcast or not, for a tile."""
    part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return part[..., columns] if mask.shape[-1] > 1 else part


class _BiasedAttention(torch.autograd.Function):
    """Keeps its operands, its result and the normalisers, as the kernels of GPUs do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float) -> Tensor:
        out, lse = flash_forward(q, k, v, mask, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():  # the normalisers are no function of q, k and the bias here
            raise RuntimeError(
                "attention with a bias that needs a gradient was differentiated twice; on a CPU it has one derivative."
                "\n  try: the attention in plain products and a softmax"
            )
        q, k, v, mask, out, lse = ctx.saved_tensors
        dq, dk, dv, dmask = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v, mask))
        starts = (range(0, size, TILE) for size in (q.shape[2], k.shape[2]))
        for row, column in product(*starts):
            if ctx.causal and column > row:
                continue
            rows, columns = slice(row, row + TILE), slice(column, column + TILE)
            own, of_rows, of_out = (x[:, :, rows].to(lse.dtype) for x in (q, grad, out))
            keys, values = (x[:, :, columns].to(lse.dtype) for x in (k, v))
            scores = (own @ keys.mT).mul_(ctx.scale).add_(part_of(mask, rows, columns))
            weights = scores.sub_(lse[:, :, rows, None]).exp_()
            if ctx.causal and column == row:
                weights.tril_()
            made = tile_gradients(own, keys, values, weights, of_rows, of_out, ctx.scale)
            dq[:, :, rows] += made.q
            dk[:, :, columns] += made.k
            dv[:, :, columns] += made.v
            part = part_of(dmask, rows, columns)
            part += made.scores.sum_to_size(part.shape)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask.to(mask.dtype), None, None
