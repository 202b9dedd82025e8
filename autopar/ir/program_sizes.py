"""Sizes of one rank's program, of any number of rows and any lengths.

    captured        batch 8, length 16             view(x, [batch, length, 4, 64])
    local program   2 ranks, 2 microbatches        view(x, [rows, length/2, 4, 64])       rows is batch/4

Sizes of tensors are expressions in ``rows``, those of this rank in one microbatch, which may differ from microbatch to
microbatch and from rank to rank. Numbers that an op computes with, as the divisor of a mean is, stay expressions in
``batch``, the rows of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from autopar.ir.sizes import Point, Size, evaluated

ROWS = "rows"

# An expression, and what it has to be a multiple of.
Divisor = tuple[sympy.Expr, int]


@dataclass(frozen=True, slots=True)
class ProgramSizes:
    """Symbols of a program, by name: ``batch``, ``rows``, lengths.

    divides: what has to be a multiple of what, so that shards are equal, as (expression, divisor). unless: a program
    with more shards is to be taken where all of these divide; None if there is none.
    """

    symbols: Mapping[str, sympy.Symbol]
    divides: frozenset[Divisor] = frozenset()
    unless: frozenset[Divisor] | None = None

    def point(self, sizes: Mapping[str, int]) -> Point:
        """The value of every symbol. sizes: by name; more than the symbols are allowed."""
        return {symbol: sizes[name] for name, symbol in self.symbols.items()}

    def hold_at(self, point: Point) -> bool:
        """Whether the program is for those sizes."""
        return _divide(self.divides, point) and (self.unless is None or not _divide(self.unless, point))


def _divide(divisors: frozenset[Divisor], point: Point) -> bool:
    values = tuple(point.items())
    return all(evaluated(expression, values) % divisor == 0 for expression, divisor in divisors)


class SizeValues(dict[sympy.Expr, Any]):
    """The numbers that the expressions of a program are at one point, worked out when they are first asked for.

    has_rows: whether the microbatch has any rows.
    """

    def __init__(self, point: Point, *, has_rows: bool = True) -> None:
        super().__init__()
        self.has_rows = has_rows
        self._point = tuple(point.items())

    def __missing__(self, expression: sympy.Expr) -> Any:
        value = evaluated(expression, self._point)
        self[expression] = number = int(value) if value.is_integer else value.p / value.q
        return number

    def shape(self, sizes: Sequence[int]) -> list[int]:
        """A shape of the program as it is here."""
        return [self[size.expression] if isinstance(size, Size) else size for size in sizes]


FIXED = SizeValues({})
"""Those of a program without symbols, of which nothing is asked."""
