"""Attention over a block of keys, such that blocks can be put together: results with their log-sum-exps.

    out, lse = forward(q, k_block, v_block)              softmax over this block alone
    merge(out, lse, more_out, more_lse)                  softmax over both
    dq, dk_block, dv_block = backward(grad, .., lse)     with the log-sum-exp over all blocks

Fused kernels where they apply, else tiles of ``TILE`` queries by ``TILE`` keys (Dao, arXiv:2307.08691, section 3).
Shapes: q (B, Hq, S, D), k (B, Hkv, T, D), v (B, Hkv, T, Dv), lse (B, Hq, S). A row that sees nothing has result 0
and log-sum-exp -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from autopar.ir.ops.biased_attention import part_of, tile_gradients
from autopar.ir.ops.composite import AttentionKind, repeat_heads
from autopar.ir.ops.flash_cpu import flash_backward, flash_forward
from autopar.ir.sequence import Block, Sight, Span
from autopar.ir.torch_private import (
    EFFICIENT_CUDA,
    EFFICIENT_CUDA_BACKWARD,
    FLASH_CUDA,
    FLASH_CUDA_BACKWARD,
)

_aten = torch.ops.aten

# Queries, and keys, of a tile.
TILE = 1024

# The memory-efficient CUDA kernel pads the log-sum-exp to this many queries, and wants heads of this alignment.
_ALIGNED_QUERIES, _ALIGNED_HEAD = 32, 8


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of a block: scale, who sees whom, and whether a kernel takes the block whole."""

    scale: float
    sight: Sight
    block: Block

    @property
    def kernel_causal(self) -> bool | None:
        """``is_causal`` of a fused kernel, None if its mask is no other block's than this one's."""
        if self.block.whole:
            return False
        square = self.block.queries == self.block.keys
        # Inside a window a sliding mask is a causal one.
        hides_more = self.sight.kind == "sliding" and len(self.block.keys) > (self.sight.window or 0)
        return True if square and not hides_more else None


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype of sums over keys."""
    return torch.promote_types(x.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Put the attention over further keys into ``out`` (wide) and ``lse``, in place."""
    both = torch.logaddexp(lse, more_lse)
    finite = _finite(both)
    out.mul_(torch.exp(lse - finite)[..., None]).add_(more_out * torch.exp(more_lse - finite)[..., None])
    lse.copy_(both)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys and its log-sum-exp, in the wide dtype or the operands'.

    mask: of the block; boolean or additive, broadcasting to (B, Hq, S, T).
    """
    causal = scores.kernel_causal
    if mask is None and causal is not None:
        if _takes_cpu_flash(q, v):
            return flash_forward(q, repeat_heads(k, q), repeat_heads(v, q), None, causal=causal, scale=scores.scale)
        if _takes_cuda_flash(q, v):
            out, lse, *_ = FLASH_CUDA(q, k, v, 0.0, causal, scale=scores.scale)
            return out, lse
        if _takes_cuda_efficient(q, v):
            out, lse, *_ = EFFICIENT_CUDA(
                q, repeat_heads(k, q), repeat_heads(v, q), None, True, 0.0, causal, scale=scores.scale
            )
            return out, lse
    block, sight = scores.block, scores.sight
    spans = [end for span in (block.rows, block.columns, block.queries, block.keys) for end in span]
    found: tuple[Tensor, Tensor] = _by_tiles(
        q, k, v, mask, scores.scale, sight.kind, sight.window, spans, scores.block.whole
    )
    return found


@torch.library.custom_op("autopar::attention_by_tiles", mutates_args=())
def _by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    kind: str,
    window: int | None,
    spans: Sequence[int],
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """One op, so that selective rematerialisation keeps what comes out of it and none of the products inside.

    spans: starts and ends of the block's rows, columns, queries and keys.
    """
    rows, columns, queries, keys = (Span(*spans[at : at + 2]) for at in range(0, 8, 2))
    block = Block(rows=rows, columns=columns, queries=queries, keys=keys, whole=whole)
    scores = Scores(scale, Sight(cast(AttentionKind, kind), window), block)
    wide = wide_dtype(q)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
    for row, column in _tiles(scores):
        tile = _tile(q, k, mask, scores, row, column)
        tile_lse = torch.logsumexp(tile, -1)
        weights = tile.sub_(_finite(tile_lse)[..., None]).exp_()
        more = weights @ repeat_heads(v[:, :, column.start : column.stop], q).to(wide)
        merge(out[:, :, row.start : row.stop], lse[:, :, row.start : row.stop], more, tile_lse)
    return out, lse


@_by_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(q)
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=wide), q.new_empty(q.shape[:3], dtype=wide)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    grad_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of the block's k and v. ``out`` and ``lse`` are those over all keys.

    grad_mask: what the gradient of the block's mask is added to, in place; None if nobody wants it.
    """
    causal = scores.kernel_causal
    if mask is None and causal is not None:
        if _takes_cpu_flash(q, v):
            dq, dk, dv = flash_backward(
                grad, q, repeat_heads(k, q), repeat_heads(v, q), out, lse, causal=causal, scale=scores.scale
            )
            return dq, _sum_groups(dk, k), _sum_groups(dv, v)
        if _takes_cuda_flash(q, v):
            no_seed = torch.empty(0, dtype=torch.uint64, device=q.device)
            dq, dk, dv = FLASH_CUDA_BACKWARD(
                grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, no_seed, no_seed,
                scale=scores.scale,
            )  # fmt: skip
            return dq, dk, dv
        if _takes_cuda_efficient(q, v):
            no_seed = torch.empty((), dtype=torch.int64, device=q.device)
            dq, dk, dv, _ = EFFICIENT_CUDA_BACKWARD(
                grad, q, repeat_heads(k, q), repeat_heads(v, q), None, out, lse.contiguous(), no_seed, no_seed, 0.0,
                [True, True, True, False], causal, scale=scores.scale,
            )  # fmt: skip
            return dq, _sum_groups(dk, k), _sum_groups(dv, v)
    wide = wide_dtype(q)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, columns in _tiles(scores):
        row, column = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        values, keys = (repeat_heads(x[:, :, column], q).to(wide) for x in (v, k))
        own, row_grad = q[:, :, row].to(wide), grad[:, :, row].to(wide)
        weights = _tile(q, k, mask, scores, rows, columns).sub_(_finite(lse[:, :, row])[..., None]).exp_()
        made = tile_gradients(own, keys, values, weights, row_grad, out[:, :, row], scores.scale)
        dq[:, :, row] += made.q
        dk[:, :, column] += _sum_groups(made.k, k)
        dv[:, :, column] += _sum_groups(made.v, v)
        if grad_mask is not None:
            part = part_of(grad_mask, row, column)
            part += made.scores.sum_to_size(part.shape)
    return dq, dk, dv


def _tiles(scores: Scores) -> Iterator[tuple[Span, Span]]:
    """Rows and columns of the tiles of the block in which anything is seen, counted from the block's first ones."""
    block = scores.block
    for row in range(0, len(block.rows), TILE):
        rows = Span(row, min(row + TILE, len(block.rows)))
        for column in range(0, len(block.columns), TILE):
            columns = Span(column, min(column + TILE, len(block.columns)))
            if block.whole or not scores.sight.sees_none(*_positions(block, rows, columns)):
                yield rows, columns


def _positions(block: Block, rows: Span, columns: Span) -> tuple[Span, Span]:
    first, first_key = block.queries.start, block.keys.start
    return Span(first + rows.start, first + rows.stop), Span(first_key + columns.start, first_key + columns.stop)


def _tile(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores, rows: Span, columns: Span) -> Tensor:
    """Scores of a tile, -inf where nothing is seen."""
    wide = wide_dtype(q)
    keys = repeat_heads(k[:, :, columns.start : columns.stop], q).to(wide)
    tile = (q[:, :, rows.start : rows.stop].to(wide) @ keys.mT).mul_(scores.scale)
    if mask is not None:
        part = part_of(mask, slice(*rows), slice(*columns))
        tile = tile.masked_fill_(~part, float("-inf")) if part.dtype == torch.bool else tile.add_(part)
    if not scores.block.whole:
        queries, key_span = _positions(scores.block, rows, columns)
        if not scores.sight.sees_all(queries, key_span):
            position = torch.arange(*queries, device=q.device)[:, None]
            key_position = torch.arange(*key_span, device=q.device)
            hidden = key_position > position
            if scores.sight.kind == "sliding":
                hidden = hidden | (key_position <= position - (scores.sight.window or 0))
            tile.masked_fill_(hidden, float("-inf"))
    return tile


def _finite(lse: Tensor) -> Tensor:
    """A log-sum-exp to subtract: of rows that see nothing it is -inf, and -inf from -inf is no number."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _sum_groups(grad: Tensor, x: Tensor) -> Tensor:
    """The conjugate of ``repeat_heads``."""
    return grad if grad.shape[1] == x.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _takes_cpu_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[3] == v.shape[3]


def _takes_cuda_flash(q: Tensor, v: Tensor) -> bool:
    size = q.shape[3]
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and narrow and size == v.shape[3] and size % _ALIGNED_HEAD == 0 and size <= 256


def _takes_cuda_efficient(q: Tensor, v: Tensor) -> bool:
    sizes = (q.shape[3], v.shape[3])
    aligned = q.shape[2] % _ALIGNED_QUERIES == 0 and all(size % _ALIGNED_HEAD == 0 for size in sizes)
    return q.is_cuda and q.dtype is torch.float32 and aligned
