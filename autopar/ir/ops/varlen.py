"""Attention within documents as one call of a variable-length kernel, on GPUs: ``torch.nn.attention.varlen``.

    documents   0 0 0 1 1 1 1 2      queries and keys (8, heads, size), documents begin at 0 3 7, and end at 8

A kernel for every document is as much work, but many starts: a row of 64K tokens may hold hundreds of documents. What
the kernel does not take (float32, masks, sinks, dropout, CPUs) runs document by document
(``documents.attend_in_documents``), which is the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.documents import Runs


@cache
def _kernel() -> tuple[Callable[..., Any], bool] | None:
    """The public function, and whether it takes grouped heads; None if this torch has none that we can tell a scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if {"scale", "window_size"} <= known.keys() else None


def takes_documents(q: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, kind: str, dropout: float) -> bool:
    """Whether the kernel takes this attention. q: (B, Hq, S, D). v: (B, Hkv, T, Dv)."""
    plain = mask is None and sinks is None
    fits = is_for_kernel(q.shape[3], v.shape[3], q.dtype, kind, plain=plain, dropout=dropout)
    return fits and q.is_cuda and q.numel() > 0 and _kernel() is not None


def is_for_kernel(size: int, value_size: int, dtype: torch.dtype, kind: str, *, plain: bool, dropout: float) -> bool:
    """Whether the kernel takes an attention on a GPU, by what a plan knows of it.

    size, value_size: of a head. plain: without a mask and sinks.
    """
    narrow = dtype in (torch.float16, torch.bfloat16)
    fits = size == value_size and size % 8 == 0 and size <= 256
    return plain and fits and narrow and dropout == 0 and kind in ("full", "causal", "sliding")


def attend_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: list[Runs],
    first: int,
    *,
    kind: str,
    window: int | None,
    scale: float,
) -> Tensor:
    """The attention of all documents of all rows, each of which is in one place of its row.

    q: (B, Hq, S, D), from position ``first`` of the row on. k, v: (B, Hkv, T, D), whole rows. rows: where documents are
    in each row, or in all alike.
    """
    found = _kernel()
    assert found is not None
    function, takes_groups = found
    batch, heads, length, size = q.shape
    ends = kind in ("causal", "sliding")
    queries, keys = list[int](), list[int]()
    parts: list[tuple[int, int]] = []
    for runs in rows * batch if len(rows) == 1 else rows:
        own = [run for run in runs if run.start < first + length and run.stop > first]
        stops = [min(run.stop, first + length) for run in own]
        queries += [stop - max(run.start, first) for run, stop in zip(own, stops, strict=True)]
        # The last query of a piece sees the last key that it is given: keys behind it are left out.
        keys += [(stop if ends else run.stop) - run.start for run, stop in zip(own, stops, strict=True)]
        parts.append((own[0].start, stops[-1] if ends else own[-1].stop))
    if not takes_groups and k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    flat_k, flat_v = (_flat(x, parts) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if takes_groups and k.shape[1] != heads else {}
    reach = {"causal": (-1, 0), "sliding": ((window or 1) - 1, 0)}.get(kind, (-1, -1))
    out: Tensor = function(
        q.transpose(1, 2).reshape(-1, heads, size), flat_k, flat_v, _cumulative(tuple(queries), q.device),
        _cumulative(tuple(keys), q.device), max(queries), max(keys), scale=scale, window_size=reach, **options,
    )  # fmt: skip
    return out.view(batch, length, heads, size).transpose(1, 2)


def _flat(x: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """(positions, H, D): those ``parts`` of the rows, one after another."""
    by_row = x.transpose(1, 2)
    if all(part == (0, x.shape[2]) for part in parts):
        return by_row.reshape(-1, *by_row.shape[2:])
    return torch.cat([row[slice(*part)] for row, part in zip(by_row, parts, strict=True)])


@lru_cache(maxsize=64)
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each begins, and the end; all layers of a step have the same."""
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
