"""Attention within documents that are packed into rows: a query sees keys of its own document alone.

    documents   0 0 0 1 1 1 1 2      three attentions, of 3, 4 and 1 positions

Each document is an attention by itself, so neither scores nor a mask over a whole row exist: memory is linear in the
length of a row, and work is the sum over documents.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.ir.torch_private import writes_to


class Run(NamedTuple):
    """Positions ``start`` to ``stop``, exclusive, of a row that are all of one document."""

    start: int
    stop: int
    document: int


Runs = tuple[Run, ...]

# Attention of queries, keys, values and a mask, the first query being at that position of the keys.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]

# All layers have one tensor of documents: it is read once.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def runs_of(documents: Tensor) -> list[Runs]:
    """Where documents begin and end in each row.

    documents: (B, S) integers, the same for positions of one document.
    """
    if documents.is_inference():  # such tensors do not count what is written to them
        return _runs(documents)
    version = writes_to(documents)
    known: tuple[int, list[Runs]] | None = _known.get(documents)
    if known is None or known[0] != version:  # a step input may have been written to
        known = _known[documents] = version, _runs(documents)
    return known[1]


def in_one_piece(rows: list[Runs]) -> bool:
    """Whether each document is in one place of its row."""
    return all(len({run.document for run in runs}) == len(runs) for runs in rows)


def _runs(documents: Tensor) -> list[Runs]:
    rows, length = documents.shape
    changes = torch.ones(rows, length, dtype=torch.bool, device=documents.device)
    torch.ne(documents[:, 1:], documents[:, :-1], out=changes[:, 1:])
    found: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for (row, start), own in zip(changes.nonzero().tolist(), documents[changes].tolist(), strict=True):
        found[row].append((start, own))
    return [
        tuple(Run(start, stop, own) for (start, own), (stop, _) in pairwise([*runs, (length, 0)])) for runs in found
    ]


def attend_in_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: list[Runs],
    first: int,
    attend: Attend,
) -> Tensor:
    """The attention of each document by itself.

    q: (B, Hq, S, D), from position ``first`` of the row on. k, v: (B, Hkv, T, ..), whole rows. mask: broadcasts to
    (B, Hq, S, T). rows: where documents are in each row, or in all alike.
    """
    if not len(q):
        return q.new_empty(*q.shape[:3], v.shape[3])
    every = rows * len(q) if len(rows) == 1 else rows
    return torch.cat(
        [
            _attend_in_row(own, (q_row, k_row, v_row), None if mask is None else _row_of(mask, row), first, attend)
            for row, (own, q_row, k_row, v_row) in enumerate(
                zip(every, q.split(1), k.split(1), v.split(1), strict=True)
            )
        ]
    )


def _attend_in_row(
    runs: Runs, row: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, first: int, attend: Attend
) -> Tensor:
    q, k, v = row
    last = first + q.shape[2]
    # Documents are pieces of a split, not slices: the gradient of a slice is as large as the whole row.
    held = [(max(run.start, first), min(run.stop, last)) for run in runs]
    queries = q.split([max(0, high - low) for low, high in held], 2)
    lengths = [run.stop - run.start for run in runs]
    parts = []
    keys, values = k.split(lengths, 2), v.split(lengths, 2)
    for run, (low, high), query, key, value in zip(runs, held, queries, keys, values, strict=True):
        if low < high:
            part = None if mask is None else _cut(mask, slice(low - first, high - first), slice(run.start, run.stop))
            parts.append(attend(query, key, value, part, low - run.start))
    return torch.cat(parts, 2) if parts else q.new_empty(1, q.shape[1], 0, v.shape[3])


def same_document(documents: Tensor, first: int, length: int) -> Tensor:
    """(B, 1, length, T) boolean: whether a query, the first at position ``first``, and a key are of one document."""
    queries = documents[:, first : first + length]
    return (queries[:, :, None] == documents[:, None, :])[:, None]


def _row_of(mask: Tensor, row: int) -> Tensor:
    return mask[row : row + 1] if mask.shape[0] > 1 else mask


def _cut(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    if mask.shape[-2] > 1:
        mask = mask[..., queries, :]
    return mask[..., keys] if mask.shape[-1] > 1 else mask
