"""Composite ops: what captured programs mean where ATen spells it out in many ops.

Plain differentiable Python functions, used as ``call_function`` targets of captured graphs. They call
ATen, so autograd, fake tensors and ``torch.compile`` see through them, and each one picks the fastest
kernel of its device. A composite op has one factor rule and one cost, which its parts could not have.

Shape suffixes: B batch, Hq and Hkv query and key/value heads, S queries, T keys, D head size,
E experts, K experts per token, C classes, h hidden, i intermediate.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops.biased_attention import masked_attention, takes_causal
from autopar.ir.ops.documents import attend_in_documents, in_one_piece, runs_of, same_document
from autopar.ir.ops.expert_ffn import capacity_of, combine, first_of_experts, record_load, run_experts
from autopar.ir.ops.scaled_products import scaled_product
from autopar.ir.ops.scalings import Recipe
from autopar.ir.ops.varlen import attend_at_once, takes_documents
from autopar.ir.primitives.group_communication import group_size
from autopar.ir.primitives.values import has_values
from autopar.ir.torch_private import ATTENTION_OF_TWO_WIDTHS, FUSED_RMS_NORM, never_compiled

AttentionKind = Literal["full", "causal", "sliding", "mask"]
Reduction = Literal["mean", "sum", "none"]
BagMode = Literal["sum", "mean", "max"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    *,
    kind: AttentionKind,
    window: int | None = None,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Scaled dot product attention with grouped heads, a named kind of mask, and a sink for each head.

    q: (B, Hq, S, D). k: (B, Hkv, T, D). v: (B, Hkv, T, Dv). Result: (B, Hq, S, Dv). Query head h reads
        key/value head ``h // (Hq / Hkv)``.
    kind: "full": every query sees every key. "causal": query s sees keys ``t <= s``. "sliding": query s
        sees ``s - window < t <= s``. "mask": what the operand ``mask`` says.
    mask: boolean (True: seen) or added to the scores; broadcasts to (B, Hq, S, T). Needed by kind "mask".
        The other kinds take it too, and then both must allow a key (padding under a causal mask).
    sinks: (Hq,). The score of one more key that every query of a head sees, and whose value is 0.
    documents: (B, S) or (1, S) integers, S being T: of keys, a query sees those of its own document alone.
    """
    if documents is not None and has_values(documents):
        packed: Tensor = _attention_in_documents(
            q, k, v, mask, sinks, documents, kind=kind, window=window, scale=scale, dropout_p=dropout_p
        )
        return packed
    if sinks is not None:
        return _attention_with_sinks(q, k, v, mask, sinks, kind=kind, window=window, scale=scale, dropout_p=dropout_p)
    width = v.shape[3]
    if q.device.type == "cpu" and q.shape[3] != width and not dropout_p:
        if mask is None and kind in ("full", "causal") and not torch.compiler.is_compiling() and not has_values(q):
            # What has a shape alone stands for what is on a GPU, where a kernel needs no padding.
            k, v = repeat_heads(k, q), repeat_heads(v, q)
            found: Tensor = ATTENTION_OF_TWO_WIDTHS(q, k, v, None, True, 0.0, kind == "causal", False, scale=scale)[0]
            return found
        q, k, v = _of_one_width(q, k, v)
        return attention(q, k, v, mask, kind=kind, window=window, scale=scale)[..., :width]
    grouped = k.shape[1] != q.shape[1]
    if grouped and not (mask is None and kind in ("full", "causal") and _kernel_takes_groups(q, v)):
        k, v, grouped = repeat_heads(k, q), repeat_heads(v, q), False
    queries, keys = q.shape[2], k.shape[2]
    if kind == "sliding":
        assert window is not None, "a sliding window needs its size"
        if window >= keys:
            kind = "causal"
        elif goes_in_pieces(kind, window, queries, keys, masked=mask is not None):
            return _sliding_attention(q, k, v, None, window=window, scale=scale, dropout_p=dropout_p)
    if mask is None and kind in ("full", "causal"):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=kind == "causal", scale=scale, enable_gqa=grouped
        )
    causal = kind == "causal" and queries == keys and takes_causal(q, k, v, mask, dropout_p)
    if kind in ("causal", "sliding") and not causal:
        mask = both(_causal_mask(queries, keys, 0, window if kind == "sliding" else None, q.device), mask)
    return masked_attention(q, k, v, mask, causal=causal, scale=scale, dropout_p=dropout_p)


def goes_in_pieces(kind: AttentionKind, window: int | None, queries: int, keys: int, *, masked: bool) -> bool:
    """Whether an attention runs window by window, each piece of queries against the keys that it sees. masked: it has a
    mask beside its kind."""
    return kind == "sliding" and window is not None and not masked and queries == keys and queries > 2 * window


@never_compiled
def _attention_in_documents(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, documents: Tensor, **options: Any
) -> Tensor:
    rows = runs_of(documents)
    if not in_one_piece(rows):
        mask = both(same_document(documents, 0, q.shape[2]), mask)
        options["kind"] = "mask" if options["kind"] == "full" else options["kind"]
        return attention(q, k, v, mask, sinks, **options)
    if takes_documents(q, v, mask, sinks, options["kind"], options["dropout_p"]):
        return attend_at_once(q, k, v, rows, 0, kind=options["kind"], window=options["window"], scale=options["scale"])
    return attend_in_documents(
        q, k, v, mask, rows, 0, lambda q, k, v, mask, _: attention(q, k, v, mask, sinks, **options)
    )


def _attention_of_any_size(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


# How it is computed depends on the length and the window, and what it gives does not.
attention.of_any_size = _attention_of_any_size  # type: ignore[attr-defined]  # read where sizes are symbols


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    per_sample_weights: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    mode: BagMode,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """The sum, mean or maximum of those rows of a table that each bag names.

    weight: (V, h). indices: (B, L) integers; with ``offsets`` (N,), and then bag b begins at ``offsets[b]``.
    per_sample_weights: like ``indices``, factors of the rows in a sum. Result: (B, h). padding_idx: a row that does not
    count; a bag of nothing else is zero. include_last_offset: ``offsets`` has the end of the last bag too.
    """
    return F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def columns_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight + bias``: a linear layer that stores its matrix as (inputs, outputs), as GPT-2's do.

    input: (..., i). weight: (i, o). bias: (o,). Result: (..., o). A transpose of the parameter ahead of ``linear``
    would have to sum its gradient over data-parallel ranks in every microbatch.
    """
    return F.linear(input, weight.t(), bias)


def scaled_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    by_columns: bool = False,
    row_groups: tuple[str, ...] = (),
    depth_groups: tuple[str, ...] = (),
    column_groups: tuple[str, ...] = (),
    history: Tensor | None = None,
) -> Tensor:
    """A linear layer whose three products, of the result and of both gradients, are in 8-bit floats by ``recipe``.

    input: (..., i). weight: (o, i), or (i, o) if ``by_columns``. bias: (o,). Result: (..., o), of the input's dtype.
    row_groups, depth_groups, column_groups: groups of ranks that hold pieces of the rows, of i and of o, over which
        scales are taken. Over ``depth_groups`` the result is a summand.
    history: of the largest magnitudes of earlier steps, where scales follow from those (``maxima_history``).
    """
    matrix = weight.t() if by_columns else weight
    rows = input.reshape(-1, input.shape[-1])
    result = scaled_product(rows, matrix, recipe, row_groups, depth_groups, column_groups, history)
    if bias is not None:
        for group in depth_groups:
            bias = bias / group_size(group)
        result = result + bias
    return result.view(*input.shape[:-1], result.shape[-1])


def annotated(x: Tensor, *, placements: str) -> Tensor:
    """``x`` itself, in placements that the user fixes with ``autopar.constrain`` (``tp=2 dp=*``)."""
    return x.view_as(x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2, -1) + eps) * weight`` over the last dimension.

    x: (..., h). weight: (h,) or None. Computed in float32 for narrower dtypes; the result has x's dtype.
    """
    if weight is not None:
        weight = weight.to(x.dtype)
    if x.device.type == "cpu":
        result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return result
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and a scale per row, as the kernel of a GPU does. On CPU autograd would keep every step of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        # The composite of several kernels, which computes in float32.
        result: Tensor
        result, scale = FUSED_RMS_NORM(x, (x.shape[-1],), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal).sum_to_size(weight.shape).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        slope = grad.to(scale.dtype) if weight is None else grad * weight.to(scale.dtype)
        along = (slope * normal).mean(-1, keepdim=True)
        return (slope - normal * along).mul_(scale).to(x.dtype), grad_weight, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross entropy of class indices, with the classes in the last dimension.

    logits: (..., C), widened to float32 if narrower. target: (...), integers. Result: a scalar, or (...)
    for reduction "none". "mean" divides by the number of targets that are not ``ignore_index``.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def moe(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str,
    gated: bool,
    interleaved: bool = False,
    capacity_factor: float | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Mixture of experts: each token through its K experts, summed with their weights.

    x: (..., h). expert_index: (..., K) integers below E. expert_weight: (..., K).
    w_up: (E, u, h) with u = 2 i if gated, the gate's rows first, or every second one if interleaved; else i.
    w_down: (E, h, i). b_up: (E, u). b_down: (E, h). Result: (..., h).
    activation: a key of ``experts.ACTIVATIONS``, of the gate that is multiplied with the value, or an expression over
        both (``gates.py``).
    capacity_factor: an expert takes at most this many times an even share of the rows, ``ceil(factor * T * K / E)``
        for T tokens: the first in order of tokens, and of a token's choices. The rest of its rows count as zero.
    recipe: of narrow floats, in which the products are (``scaled_experts``).

    But for that, tokens are independent of each other; the result is linear in ``expert_weight`` and ``w_down``.
    Work: ``2 * tokens * K * h * (u + i)`` operations, whatever the routing.
    """
    chosen, num_experts = expert_index.reshape(-1), w_up.shape[0]
    record_load(chosen, num_experts)
    order = chosen.argsort(stable=True)
    if capacity_factor is not None and has_values(x):
        capacity = capacity_of(len(chosen), num_experts, capacity_factor)
        order = order[first_of_experts(chosen, torch.zeros_like(chosen[:1]).expand(num_experts), capacity)[order]]
    expert = chosen[order]

    def experts(rows: Tensor) -> Tensor:
        return run_experts(
            rows,
            expert,
            w_up=w_up,
            w_down=w_down,
            b_up=b_up,
            b_down=b_down,
            activation=activation,
            gated=gated,
            interleaved=interleaved,
            recipe=recipe,
        )

    return combine(x, expert_weight, order, experts)


def _kernel_takes_groups(q: Tensor, v: Tensor) -> bool:
    """Whether a fused kernel without a mask reads key and value heads as they are."""
    size = q.shape[3]
    if q.is_cuda:
        narrow = q.dtype in (torch.float16, torch.bfloat16)
        return narrow and size == v.shape[3] and size % 8 == 0 and size <= 256
    return q.device.type == "cpu" and size == v.shape[3]


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as wide for values as for keys, which the fused kernel for CPUs needs; without it there are all scores."""
    width = max(q.shape[3], v.shape[3])
    q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    return q, k, v


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, Hkv, T, D) -> (B, Hq, T, D), for kernels that take no grouped heads. q: (B, Hq, ...)."""
    heads = q.shape[1]
    if x.shape[1] == heads:
        return x
    batch, groups, length, size = x.shape
    return x[:, :, None].expand(batch, groups, heads // groups, length, size).reshape(batch, heads, length, size)


def _causal_mask(queries: int, keys: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys) boolean; query row r has position ``first + r``."""
    positions = torch.arange(first, first + queries, device=device)[:, None]
    key_positions = torch.arange(keys, device=device)[None, :]
    seen = key_positions <= positions
    return seen if window is None else seen & (key_positions > positions - window)


def both(seen: Tensor, mask: Tensor | None) -> Tensor:
    """A mask that lets through what ``seen`` does, (.., S, T) boolean, and ``mask`` as well."""
    if mask is None:
        return seen
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask with a first key that scores ``sinks`` for every query and has value 0.

    The score is written into one more dimension of the heads, in which no other key has anything, so that any kernel
    of attention does the rest: nothing of the size of the scores is made.
    """
    batch, heads, queries, _ = q.shape
    score = (sinks.to(q.dtype) / scale)[None, :, None, None].expand(batch, heads, queries, 1)
    sink = torch.cat([k.new_zeros(*k.shape[:2], 1, k.shape[3]), k.new_ones(*k.shape[:2], 1, 1)], 3)
    keys = torch.cat([sink, torch.cat([k, k.new_zeros(*k.shape[:3], 1)], 3)], 2)
    values = torch.cat([v.new_zeros(*v.shape[:2], 1, v.shape[3]), v], 2)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], k.shape[2])
        first = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
        mask = torch.cat([first(*mask.shape[:-1], 1), mask], -1)
    return torch.cat([q, score], 3), keys, values, mask


def _attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    *,
    kind: AttentionKind,
    window: int | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    if kind == "sliding" and window is not None and window >= keys:
        kind = "causal"
    if kind == "causal" and mask is None:
        # A query ahead of the others sees the sink alone, so that query s sees it and the keys up to s.
        q, k, v, _ = with_sinks(F.pad(q, (0, 0, 1, 0)), k, v, sinks, None, scale)
        return attention(q, k, v, kind="causal", scale=scale, dropout_p=dropout_p)[:, :, 1:]
    if goes_in_pieces(kind, window, queries, keys, masked=mask is not None):
        assert window is not None
        return _sliding_attention(q, k, v, sinks, window=window, scale=scale, dropout_p=dropout_p)
    if kind in ("causal", "sliding"):
        mask = both(_causal_mask(queries, keys, 0, window if kind == "sliding" else None, q.device), mask)
    q, k, v, mask = with_sinks(q, k, v, sinks, mask, scale)
    return attention(q, k, v, mask, kind="full" if mask is None else "mask", scale=scale, dropout_p=dropout_p)


def _sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, window: int, scale: float, dropout_p: float
) -> Tensor:
    """Chunks of ``window`` queries against the at most ``2 * window - 1`` keys they see: no S by S tensor."""
    length = q.shape[2]
    parts = []
    for start in range(0, length, window):
        end, first = min(start + window, length), max(start - window + 1, 0)
        seen = _causal_mask(end - start, end - first, start - first, window, q.device)
        chunk = (q[:, :, start:end], k[:, :, first:end], v[:, :, first:end])
        parts.append(attention(*chunk, seen, sinks, kind="mask", scale=scale, dropout_p=dropout_p))
    return torch.cat(parts, dim=2)
