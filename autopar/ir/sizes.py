"""Sizes that know what they are of the batch and the lengths of the sequences.

    tokens (8, 16), captured with symbols          view(x, [8, 16, 4, 64])       8 is batch, 16 is length
                                                   view(x, [128, 256])           128 is batch*length

A ``Size`` is the integer of the capture, and behaves as it: what reads a graph need not know of symbols. Arithmetic
hands the expression on, but where a float is on the left (write ``1 / size``, not ``1.0 / size``). ``at`` gives the
number for another batch or length. ``Ratio`` is the same for numbers that are divided by sizes, as a mean is.

Expressions are sympy's, over the symbols of one capture (``CapturedModel.symbols``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, TypeVar

import sympy

Point = Mapping[sympy.Symbol, int]
"""A value of every symbol."""

T = TypeVar("T")


class _Expressed:
    """A number with the expression that gave it."""

    expression: sympy.Expr

    def __add__(self, other: Any) -> Any:
        return _made(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _made(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _made(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _made(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _made(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _made(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _made(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _made(operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _made(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _made(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _made(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _made(operator.mod, other, self)

    def __neg__(self) -> Any:
        return self * -1

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __reduce__(self) -> Any:
        return type(self), (_PLAIN[type(self)](self), self.expression)


class Size(_Expressed, int):
    """An integer of a capture. ``expression``: what it is for any batch and length."""

    def __new__(cls, value: int, expression: sympy.Expr) -> Size:
        """value: what ``expression`` is at the sizes of the capture."""
        made = int.__new__(cls, value)
        made.expression = expression
        return made

    __hash__ = int.__hash__
    __repr__ = int.__repr__


class Ratio(_Expressed, float):
    """A number of a capture that sizes divide. ``expression``: what it is for any batch and length."""

    def __new__(cls, value: float, expression: sympy.Expr) -> Ratio:
        """value: what ``expression`` is at the sizes of the capture."""
        made = float.__new__(cls, value)
        made.expression = expression
        return made

    __hash__ = float.__hash__
    __repr__ = float.__repr__


_PLAIN: dict[type, Callable[[Any], Any]] = {Size: int, Ratio: float}
_OF_EXPRESSIONS: dict[Any, Callable[[Any, Any], Any]] = {
    operator.floordiv: lambda a, b: sympy.floor(a / b),
    operator.mod: sympy.Mod,
}


def _made(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """``function`` of two numbers, one of them with an expression."""
    values = [plain(number) for number in (a, b)]
    if any(type(number) not in (int, float) for number in values):
        return NotImplemented
    return expressed(function(*values), _OF_EXPRESSIONS.get(function, function)(expression_of(a), expression_of(b)))


def expression_of(number: complex) -> sympy.Expr:
    """What a number is of the symbols; itself if it is none of them."""
    if isinstance(number, _Expressed):
        return number.expression
    # A float is the fraction that it is, so that nothing is rounded before the end.
    return sympy.Rational(number) if isinstance(number, float) else sympy.sympify(number)


def product(sizes: Sequence[int]) -> int:
    """Of all sizes, with its expression; ``math.prod`` drops that."""
    return reduce(operator.mul, sizes, 1)


def same_sizes(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are the same at all sizes, not just at those of the capture."""
    return len(a) == len(b) and all(map(_same_size, a, b))


def _same_size(a: int, b: int) -> bool:
    # Of two plain numbers, which most are, no expression is made.
    return a == b and ((not isinstance(a, Size) and not isinstance(b, Size)) or expression_of(a) == expression_of(b))


def plain(value: T) -> T:
    """``value`` as it is at the sizes of the capture, without an expression."""
    return _PLAIN[type(value)](value) if isinstance(value, _Expressed) else value  # type: ignore[return-value]


def expressed(value: Any, expression: sympy.Expr) -> Any:
    """``value`` with its expression; ``value`` alone where that is a constant, or it is no number."""
    if not expression.free_symbols or isinstance(value, bool):
        return value
    return Size(value, expression) if isinstance(value, int) else Ratio(value, expression)


def at(number: T, point: Point) -> T:
    """The plain number that one of a capture is at other sizes. What has no expression stays as it is."""
    if not isinstance(number, _Expressed):
        return number
    value = evaluated(number.expression, tuple(point.items()))
    if isinstance(number, Size):
        return int(value)  # type: ignore[return-value]  # of the same kind
    return value.p / value.q if value.is_Rational else float(value)  # type: ignore[return-value]  # likewise


def moved_to(number: T, point: Point) -> T:
    """The number that one of a capture is at other sizes, with its expression."""
    return expressed(at(number, point), number.expression) if isinstance(number, _Expressed) else number


@lru_cache(maxsize=1 << 16)
def evaluated(expression: sympy.Expr, point: tuple[tuple[sympy.Symbol, int], ...]) -> Any:
    """Value of an expression where each symbol has a value."""
    return expression.xreplace({symbol: sympy.Integer(value) for symbol, value in point})
