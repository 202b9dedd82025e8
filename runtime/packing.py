"""Which documents go into which row of a batch, so that all rows are as much work.

    lengths 9 5 4 3 3, 2 rows of 12 tokens, work length^2          9            work 81
                                                                   5 4 3        work 50; and 3 in the next batch

Documents are taken in the order in which they come, as many as fit. Those of a batch are dealt out, the longest first,
each to the row with the least work that has room for it (Graham's rule, at most 4/3 of the least possible without the
limit of tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One global batch. count: documents that it takes. rows: their numbers, by row, by data-parallel rank."""

    count: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """rows: of a global batch, as many for each of ``ranks``. max_tokens: of a row. work: of a document's length."""

    rows: int
    ranks: int
    max_tokens: int
    work: Callable[[int], float]

    def batches(self, order: Sequence[int], lengths: Sequence[int], *, drop_last: bool) -> Iterator[PackedBatch]:
        """The batches of documents in an order. lengths: of every document, by number.

        drop_last: leave out a last batch that has room for more.
        """
        start = 0
        while start < len(order):
            count, rows = self._next(order, lengths, start)
            start += count
            if start == len(order) and drop_last and self._has_room(rows, lengths):
                return
            yield PackedBatch(count, self._by_rank(rows, lengths))

    def _next(self, order: Sequence[int], lengths: Sequence[int], start: int) -> tuple[int, list[list[int]]]:
        """How many documents go into the batch that begins at ``start``, and the rows that they make."""
        end, tokens = start, 0
        while end < len(order) and tokens + lengths[order[end]] <= self.rows * self.max_tokens:
            tokens += lengths[order[end]]
            end += 1
        while True:
            rows = self._dealt(order[start:end], lengths)
            if rows is not None:
                return end - start, rows
            end -= 1

    def _dealt(self, documents: Sequence[int], lengths: Sequence[int]) -> list[list[int]] | None:
        """Rows of as much work, None if the documents do not fit."""
        rows: list[list[int]] = [[] for _ in range(self.rows)]
        tokens, work = [0] * self.rows, [0.0] * self.rows
        for document in sorted(documents, key=lambda number: (-lengths[number], number)):
            length = lengths[document]
            open_rows = [row for row in range(self.rows) if tokens[row] + length <= self.max_tokens]
            if not open_rows:
                return None
            best = min(open_rows, key=lambda row: (work[row], row))
            rows[best].append(document)
            tokens[best] += length
            work[best] += self.work(length)
        return rows

    def _has_room(self, rows: list[list[int]], lengths: Sequence[int]) -> bool:
        """Whether a batch is less than half full."""
        return 2 * sum(lengths[document] for row in rows for document in row) < self.rows * self.max_tokens

    def _by_rank(self, rows: list[list[int]], lengths: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Rows for each rank, as many and as much work."""
        each = self.rows // self.ranks
        own: list[list[tuple[int, ...]]] = [[] for _ in range(self.ranks)]
        sums = [0.0] * self.ranks
        for row in sorted(rows, key=lambda row: -self.work_of(row, lengths)):
            rank = min((r for r in range(self.ranks) if len(own[r]) < each), key=lambda r: (sums[r], r))
            own[rank].append(tuple(row))
            sums[rank] += self.work_of(row, lengths)
        return tuple(map(tuple, own))

    def work_of(self, row: Sequence[int], lengths: Sequence[int]) -> float:
        """The work of a row."""
        return sum(self.work(lengths[document]) for document in row)
