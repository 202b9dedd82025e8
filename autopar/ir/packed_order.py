"""The order of rows of packed documents whose positions ranks share, such that all have equal work.

    documents  0 0 0 0 1 1 1 1 1 1 1 1       keys that a position sees  1 2 3 4 1 2 3 4 5 6 7 8
    2 ranks    natural order                 0 1 2 3 4 5 | 6 7 8 9 10 11             13 and 33
               by documents                  0 1 2 4 5 11 | ..  as ``order_of`` has it

A row is cut into equal chunks, a few for each rank, and the chunk with most work goes to the rank that has least work
so far. Of one document with two chunks a rank that is the zigzag layout of ``autopar.ir.sequence``. Chunks are made
smaller until the work is even, so there are no more pieces than it takes; each rank has equally many positions always.

Every rank works the order out for itself, from the documents of whole rows. A row has an order of its own: tensors
along the sequence are in one order for each row of the batch, and what they mean does not depend on which rows a rank
has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.ir.ops.documents import Runs, runs_of
from autopar.ir.primitives.values import has_values
from autopar.ir.sequence import Block, Held, Sight, Span, blocks_between, held, joined, natural_order
from autopar.ir.torch_private import never_compiled, writes_to

# Work of the busiest rank over the mean at which chunks are small enough, and the most of them that a rank is given.
# Chosen: of log-normal lengths 8 to 16 chunks a rank are enough, and what is even to 3 % ends a step no sooner if it is
# more so.
_EVEN, _MOST_CHUNKS = 1.03, 64


def work_of(runs: Runs, pieces: tuple[Span, ...]) -> list[int]:
    """Pairs of a query and a key that it sees under a causal mask within its document, for each of ``pieces``.

    pieces: in order, without gaps from 0 to the end of the row.
    """
    found, seen, number = [0] * len(pieces), defaultdict[int, int](int), 0
    for run in runs:
        start = run.start
        while start < run.stop:
            stop = min(run.stop, pieces[number].stop)
            first, last = seen[run.document], seen[run.document] + stop - start
            found[number] += (last * (last + 1) - first * (first + 1)) // 2
            seen[run.document], start = last, stop
            number += stop == pieces[number].stop
    return found


@lru_cache(maxsize=1024)
def order_of(runs: Runs, length: int, num_ranks: int) -> tuple[Span, ...]:
    """The positions of a row in the order in which ``num_ranks`` ranks hold them, ``length / num_ranks`` each.

    length: a multiple of ``num_ranks``. Those of a rank are in natural order.
    """
    best: tuple[float, tuple[Span, ...]] | None = None
    for chunks in (n for n in range(1, _MOST_CHUNKS + 1) if length // num_ranks % n == 0):
        uneven, order = _dealt(runs, length, num_ranks, chunks)
        if best is None or uneven < best[0]:
            best = uneven, order
        if uneven <= _EVEN:
            break
    return best[1] if best is not None else ()


def _dealt(runs: Runs, length: int, num_ranks: int, chunks: int) -> tuple[float, tuple[Span, ...]]:
    """Work of the busiest rank over the mean, and the order, with so many chunks for each rank."""
    count = chunks * num_ranks
    cuts = [length // count * number for number in range(count + 1)]
    pieces = tuple(Span(*ends) for ends in pairwise(cuts))
    work = work_of(runs, pieces)
    given: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for number in sorted(range(count), key=lambda n: -work[n]):
        rank = min((r for r in range(num_ranks) if len(given[r]) < chunks), key=load.__getitem__)
        given[rank].append(number)
        load[rank] += work[number]
    order = tuple(span for own in given for span in joined(tuple(pieces[number] for number in own)))
    return max(load) * num_ranks / max(sum(load), 1), order


def piece(order: tuple[Span, ...], part: Span) -> tuple[Span, ...]:
    """The positions that are stored in ``part`` of a row in ``order``."""
    found = []
    for own in held(order):
        low, high = max(own.places.start, part.start), min(own.places.stop, part.stop)
        if low < high:
            offset = own.positions.start - own.places.start
            found.append(Span(low + offset, high + offset))
    return tuple(found)


def blocks_in_documents(sight: Sight, queries: tuple[Span, ...], keys: tuple[Span, ...], runs: Runs) -> Iterator[Block]:
    """The blocks of scores of a piece of queries and one of keys that are of one document and not hidden."""
    columns = _by_document(keys, runs)
    for document, rows in _by_document(queries, runs).items():
        if document in columns:
            yield from blocks_between(sight, rows, columns[document])


def _by_document(positions: tuple[Span, ...], runs: Runs) -> dict[int, list[Held]]:
    """What a piece holds of each document."""
    found: dict[int, list[Held]] = {}
    number = 0
    for own in sorted(held(positions)):
        offset = own.places.start - own.positions.start
        while runs[number].stop <= own.positions.start:
            number += 1
        for run in runs[number:]:
            if run.start >= own.positions.stop:
                break
            part = Span(max(run.start, own.positions.start), min(run.stop, own.positions.stop))
            found.setdefault(run.document, []).append(Held(part, Span(part.start + offset, part.stop + offset)))
    return found


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Where the documents of a row are, and the order that it is stored in. One object for rows that are alike."""

    runs: Runs
    order: tuple[Span, ...]

    @lru_cache(maxsize=4096)  # noqa: B019  # rows are few, and all layers of a step ask the same of them
    def blocks(self, sight: Sight, queries: Span, keys: Span) -> tuple[Block, ...]:
        """Blocks of scores of what lies in two parts of storage; keys are put in natural order within theirs."""
        return tuple(blocks_in_documents(sight, piece(self.order, queries), joined(piece(self.order, keys)), self.runs))


@lru_cache(maxsize=256)
def _row_of(runs: Runs, order: tuple[Span, ...]) -> PackedRow:
    return PackedRow(runs, order)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of documents as they are stored; one that stands for all if they are alike."""

    rows: tuple[PackedRow, ...]

    @classmethod
    def of(cls, documents: Tensor, order: tuple[Span, ...] | None, num_ranks: int) -> PackedRows:
        """Of documents (B, S) or (1, S), in ``order``; if there is none, in that of the documents on as many ranks."""
        length = documents.shape[1]
        orders = ((runs, order_of(runs, length, num_ranks) if order is None else order) for runs in runs_of(documents))
        return cls(tuple(_row_of(*row) for row in orders))

    def blocks(self, sight: Sight, queries: Span, keys: Span) -> Iterator[tuple[slice, Block]]:
        """Blocks of scores of what lies in two parts of storage, each with the rows of the batch that it is of."""
        for number, row in enumerate(self.rows):
            rows = slice(None) if len(self.rows) == 1 else slice(number, number + 1)
            yield from ((rows, block) for block in row.blocks(sight, queries, keys))

    def in_natural_order(self, x: Tensor, parts: list[Span], dim: int) -> Tensor:
        """``x`` (B, ..), of which dimension ``dim`` holds ``parts`` of storage one after another, each put in order."""
        sizes = [len(part) for part in parts]
        rows = x.split(1) if len(self.rows) > 1 else (x,) * len(self.rows)
        put = [
            torch.cat(
                [
                    own.narrow(dim, place.start, len(place))
                    for own, part in zip(row.split(sizes, dim), parts, strict=True)
                    for place in natural_order(piece(own_row.order, part))
                ],
                dim,
            )
            for row, own_row in zip(rows, self.rows, strict=True)
        ]
        return torch.cat(put) if put else x


# Of documents: what was written to them, number of ranks -> indices of the order and of its inverse.
_indices: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def to_document_order(
    x: Tensor, documents: Tensor, *, dim: int, length: int, inner: int, num_ranks: int, rows: int | None
) -> Tensor:
    """``x`` with the sequence in ``dim`` from natural order to that of ``documents`` (B, S) for as many ranks.

    inner: elements for each position. rows: the dimension with the rows of ``documents``, ``dim`` itself if rows and
    sequence are merged there; None if all are in the order of one row.
    """
    put: Tensor = _permuted(x, documents, dim, length, inner, num_ranks, rows, back=False)
    return put


def from_document_order(
    x: Tensor, documents: Tensor, *, dim: int, length: int, inner: int, num_ranks: int, rows: int | None
) -> Tensor:
    """``x`` with the sequence in ``dim`` from the order of ``documents`` for as many ranks to natural order."""
    put: Tensor = _permuted(x, documents, dim, length, inner, num_ranks, rows, back=True)
    return put


@never_compiled
def _permuted(
    x: Tensor, documents: Tensor, dim: int, length: int, inner: int, num_ranks: int, rows: int | None, *, back: bool
) -> Tensor:
    if not has_values(documents) or not len(documents):
        return x.clone()
    index = _index(documents, num_ranks)[back]
    parts: Tensor = x.unflatten(dim, (-1, length, inner))
    if rows is None:
        return parts.index_select(dim + 1, index[0]).flatten(dim, dim + 2)
    batch = rows if rows <= dim else rows + 2
    along = dim if batch <= dim else dim + 1
    own = [row.index_select(along, order) for row, order in zip(parts.unbind(batch), index, strict=True)]
    return torch.stack(own, batch).flatten(dim, dim + 2)


def _index(documents: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """(B, S) each: the positions in the order in which they are stored, and where each position is stored."""
    key = (None if documents.is_inference() else writes_to(documents), num_ranks)
    known: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = _indices.setdefault(documents, {})
    if key[0] is None or key not in known:
        orders = [order_of(runs, documents.shape[1], num_ranks) for runs in runs_of(documents)]
        order = torch.stack([torch.cat([torch.arange(*span) for span in own]) for own in orders])
        known.clear()
        known[key] = order.to(documents.device), order.argsort(1).to(documents.device)
    return known[key]
