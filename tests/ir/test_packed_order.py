"""The order of rows of packed documents: a permutation, even, and computed block by block as whole attention is."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.ops.documents import Runs, runs_of
from autopar.ir.packed_order import (
    PackedRows,
    blocks_in_documents,
    from_document_order,
    order_of,
    piece,
    to_document_order,
    work_of,
)
from autopar.ir.sequence import Block, Sight, Span, joined, spans, stored


def documents_of(lengths: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in lengths])


def log_normal(length: int, seed: int, median: float = 400.0, sigma: float = 1.3) -> list[int]:
    """Lengths of documents that fill a row; the last one is cut."""
    draws, found = random.Random(seed), list[int]()
    while (left := length - sum(found)) > 0:
        found.append(min(left, max(1, int(median * draws.lognormvariate(0.0, sigma)))))
    return found


def pairs_of(blocks: list[Block]) -> int:
    return sum(
        Sight("causal").num_pairs(b.queries, b.keys) if not b.whole else len(b.rows) * len(b.columns) for b in blocks
    )


def busiest(order: tuple[Span, ...], runs: Runs, length: int, num_ranks: int) -> float:
    """Pairs of the rank that has most in its blocks, over the mean: each rank against the keys of each."""
    parts = [stored(length, rank, num_ranks) for rank in range(num_ranks)]
    work = [
        sum(
            pairs_of(list(blocks_in_documents(Sight("causal"), piece(order, own), joined(piece(order, keys)), runs)))
            for keys in parts
        )
        for own in parts
    ]
    assert sum(work) == sum(work_of(runs, (Span(0, length),)))
    return max(work) / mean(work)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_log_normal_documents_are_even_work(num_ranks: int) -> None:
    length, plain, zigzag, even = 16384, list[float](), list[float](), list[float]()
    for seed in range(8):
        (runs,) = runs_of(documents_of([log_normal(length, seed)]))
        orders = spans(length, 1), spans(length, num_ranks), order_of(runs, length, num_ranks)
        for found, order in zip((plain, zigzag, even), orders, strict=True):
            found.append(busiest(order, runs, length, num_ranks))
    assert max(even) <= 1.1 < 1.5 < max(plain)
    assert max(zigzag) > 1.5


def test_one_document_is_in_zigzag_layout() -> None:
    (runs,) = runs_of(torch.zeros(1, 64, dtype=torch.int64))
    for num_ranks in (2, 4, 8):
        assert busiest(order_of(runs, 64, num_ranks), runs, 64, num_ranks) == 1.0
        pieces = [set(piece(order_of(runs, 64, num_ranks), stored(64, r, num_ranks))) for r in range(num_ranks)]
        assert sorted(map(sorted, pieces)) == sorted(
            sorted(spans(64, num_ranks, r, num_ranks)) for r in range(num_ranks)
        )


rows = st.lists(st.integers(0, 2), min_size=24, max_size=24)


@given(documents=st.lists(rows, min_size=1, max_size=3), num_ranks=st.sampled_from([1, 2, 3, 4]))
def test_an_order_is_a_permutation(documents: list[list[int]], num_ranks: int) -> None:
    given_documents = torch.tensor(documents)
    for runs in runs_of(given_documents):
        order = order_of(runs, 24, num_ranks)
        assert sorted(p for span in order for p in range(*span)) == list(range(24))
        assert sum(work_of(runs, tuple(Span(*ends) for ends in pairwise([0, 5, 17, 24])))) == sum(
            documents_seen(runs, q, k) for q in range(24) for k in range(q + 1)
        )
    merged = torch.arange(len(documents) * 24 * 2 * 3).view(-1, 3)
    for x, dim, inner, rows_in in (
        (merged, 0, 2, 0),
        (torch.rand(len(documents), 2, 24), 2, 1, 0),
        (torch.rand(48, 5, len(documents)), 0, 2, 2),
    ):
        options = {"dim": dim, "length": 24, "inner": inner, "num_ranks": num_ranks, "rows": rows_in}
        put = to_document_order(x, given_documents, **options)
        assert torch.equal(from_document_order(put, given_documents, **options), x)
    own = to_document_order(given_documents, given_documents, dim=1, length=24, inner=1, num_ranks=num_ranks, rows=0)
    for row, runs, before in zip(own, runs_of(given_documents), given_documents, strict=True):
        assert torch.equal(row, before[[p for span in order_of(runs, 24, num_ranks) for p in range(*span)]])


def documents_seen(runs: Runs, query: int, key: int) -> bool:
    owner = [run.document for run in runs for _ in range(run.start, run.stop)]
    return owner[query] == owner[key]


def test_keys_in_natural_order() -> None:
    documents = documents_of([[5, 3, 8], [1, 15]])
    packed = PackedRows.of(documents, None, 4)
    x = torch.arange(16).expand(2, 16).contiguous()
    stored_x = to_document_order(x, documents, dim=1, length=16, inner=1, num_ranks=4, rows=0)
    for part in (Span(0, 8), Span(8, 16)):
        (own,) = {packed.in_natural_order(stored_x[:, None, part.start : part.stop], [part], 2)}
        assert torch.equal(own[:, 0], stored_x[:, part.start : part.stop].sort(1).values)
