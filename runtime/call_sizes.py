"""The sizes of a call's inputs on this rank, and what ranks tell each other of theirs.

    5 rows over 2 ranks, 2 microbatches     rank 0   3 rows, as 2 and 1       batch 5 on both
                                            rank 1   2 rows, as 1 and 1

Tensors of a rank have its own rows; what a mean divides by is the batch of all ranks. Ranks that share rows have to
have them of one size; others may differ, where the program allows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from autopar.ir.capture.symbols import BATCH
from autopar.ir.errors import InvalidInput
from autopar.ir.program_sizes import ROWS, ProgramSizes, SizeValues
from autopar.ir.sizes import Point
from autopar.runtime.accord import Accord

# Sizes by the names of ``symbols.SymbolicDims``: of the batch that all ranks have together, of lengths.
Sizes = tuple[tuple[str, int], ...]

_OF_ALL, _OF_RANK = "lengths of the inputs", "sizes of the inputs of data-parallel rank {}"
_ROWS = "rows of data-parallel rank {}"


@dataclass(frozen=True, slots=True)
class GivenSizes:
    """What this rank was given. rows: None of inputs without a batch. lengths: by name, with the batch left out."""

    rows: int | None
    lengths: Mapping[str, int]

    def __str__(self) -> str:
        told = ({} if self.rows is None else {ROWS: self.rows}) | dict(self.lengths)
        return ", ".join(starmap("{} {}".format, told.items()))


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Sizes of one call, on one rank.

    batch: rows of all ranks together, 0 of inputs without one. rows: of each microbatch of this rank. planned: all of
    them are those of the plan, on every rank. even: every microbatch of every rank has the same. varying: the symbols
    in which they differ. some_empty: a microbatch of some rank has no rows.
    """

    batch: int
    rows: tuple[int, ...]
    lengths: Mapping[str, int]
    planned: bool
    even: bool
    varying: frozenset[str] = frozenset()
    some_empty: bool = False

    def values(self, sizes: ProgramSizes) -> list[SizeValues]:
        """The numbers in a program with symbols, for each microbatch."""
        return [
            SizeValues(point, has_rows=rows > 0)
            for rows, point in zip(self.rows, self._points(sizes, self.rows), strict=True)
        ]

    def fit(self, sizes: ProgramSizes) -> bool:
        """Whether a program with symbols can run every microbatch."""
        return all(map(sizes.hold_at, self._points(sizes, tuple(dict.fromkeys(self.rows)))))

    def _points(self, sizes: ProgramSizes, rows: Sequence[int]) -> list[Point]:
        return [sizes.point({**self.lengths, BATCH: self.batch, ROWS: own}) for own in rows]

    def of_batch(self, num_pieces: int) -> Sizes:
        """Those of a batch of which every microbatch on every rank is as the largest one here."""
        batch = {BATCH: max(1, *self.rows) * num_pieces * len(self.rows)} if self.batch else {}
        return tuple(sorted({**self.lengths, **batch}.items()))


@dataclass(frozen=True, slots=True)
class SizeAgreement:
    """How ranks agree on sizes.

    piece: the data-parallel rank whose rows this rank has, of ``pieces``. shared: other ranks have them too. planned:
    what the plan has.
    """

    piece: int
    pieces: int
    shared: bool
    num_microbatches: int
    planned: GivenSizes

    @property
    def subjects(self) -> tuple[str, ...]:
        """What statements are about."""
        rows = tuple(map(_ROWS.format, range(self.pieces)))
        return (*rows, *(map(_OF_RANK.format, range(self.pieces)) if self.shared else ()), _OF_ALL)

    @property
    def free(self) -> tuple[str, ...]:
        """Those in which ranks may differ."""
        return (_OF_ALL,)

    def statements(self, given: GivenSizes) -> dict[str, object]:
        """What this rank says."""
        found: dict[str, object] = {_OF_ALL: tuple(given.lengths.items()), _ROWS.format(self.piece): given.rows}
        return found | ({_OF_RANK.format(self.piece): str(given)} if self.shared else {})

    def agreed(self, given: GivenSizes, accord: Accord, same: bool) -> CallSizes:
        """The sizes of a call, once all ranks have told theirs. same: all that is free is the same on all ranks."""
        if given.rows is None:
            planned = same and given == self.planned
            return CallSizes(0, (1,) * self.num_microbatches, given.lengths, planned, same, _varying(same, True))
        told = [accord.numbers.get(_ROWS.format(piece), given.rows) for piece in range(self.pieces)]
        batch, count = sum(told), self.num_microbatches
        if not batch:
            raise InvalidInput("the batch has no rows on any rank.\n  expected: at least one row")
        whole, longer = divmod(given.rows, count)
        rows = tuple(whole + (number < longer) for number in range(count))
        equal = len(set(told)) == 1 and given.rows % count == 0
        planned = same and given == self.planned and equal
        even, empty = same and equal, min(told) < count
        return CallSizes(batch, rows, given.lengths, planned, even, _varying(same, equal), empty)


def _varying(same_lengths: bool, same_rows: bool) -> frozenset[str]:
    return frozenset(({BATCH} if not same_rows else set()) | ({"length"} if not same_lengths else set()))
