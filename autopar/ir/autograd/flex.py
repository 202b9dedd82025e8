"""``flex_attention`` as the ops of its definition: scores, what the user makes of them, a softmax, a product.

torch runs it as a kernel that it compiles for a GPU, and has no backward of it on a CPU. The ops are exact on both;
they hold the scores of all queries and keys until normalisation finds a kind of attention in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.ir.autograd.replacing import replaced
from autopar.ir.torch_private import SAFE_SOFTMAX, flex_attention_entries, indexing_by_tensors, leaves_scores


@contextmanager
def flex_attention_made_plain() -> Iterator[None]:
    """Within, ``flex_attention`` runs the ops of its definition."""
    op, check, uncompiled = flex_attention_entries()
    with replaced(*op, _attention), replaced(*check, lambda *tensors: None), replaced(*uncompiled, True):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, and logarithm to base two of the sum of exponentials and of the largest score of each query.

    query: (B, Hq, S, D). key: (B or 1, Hkv, T, D). value: (B or 1, Hkv, T, Dv). Results: (B, Hq, S, Dv), and (B, Hq, S)
    twice.
    """
    from torch.nn.attention.flex_attention import noop_mask  # brings the compiler (1.5 s)

    batch, heads, queries, _ = query.shape
    key, value = (_whole(t, batch, heads) for t in (key, value))
    places = [torch.arange(size, device=query.device) for size in (batch, heads, queries, key.shape[2])]
    scores = (query @ key.transpose(-2, -1)) * scale
    with indexing_by_tensors():
        if not leaves_scores(score_mod):
            scores = _over_all(score_mod, with_score=True)(scores, *places)
        if block_mask[-1] is not noop_mask:
            seen = _over_all(block_mask[-1], with_score=False)(*places)
            scores = scores.masked_fill(~seen, -math.inf)
    result = SAFE_SOFTMAX(scores, -1) @ value
    return result, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _whole(tensor: Tensor, batch: int, heads: int) -> Tensor:
    """(B or 1, Hkv, T, D) -> (B, Hq, T, D)."""
    groups = heads // tensor.shape[1]
    if groups > 1:
        tensor = tensor.repeat_interleave(groups, dim=1)
    return tensor if tensor.shape[0] == batch else tensor.expand(batch, *tensor.shape[1:])


def _over_all(function: Callable[..., Tensor], *, with_score: bool) -> Callable[..., Tensor]:
    """``function`` of one score and of places of batch, head, query and key, for all of them."""
    first = (0,) if with_score else ()
    for axis in (3, 2, 1, 0):
        mapped = tuple(0 if place == axis else None for place in range(4))
        function = torch.vmap(function, in_dims=(*first, *mapped), out_dims=0)
    return function
