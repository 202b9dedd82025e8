"""Orders of sequences through ops: what is done alike at every position keeps the order that it is given.

    mul   d0 d1, d1 -> d0 d1          both have d1 in zigzag order, or neither; so has the result
    view  (d0 d1) -> d0 d1            within (d0 d1) as within d1

Attention whose queries and keys are both in zigzag order is a ring that is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from autopar.ir.lowered.attention import QUERIES
from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.passes.verify.terms import CapturedOp
from autopar.passes.verify.types import Mistyped, Zigzag

KEYS = "t"
Order = tuple[Zigzag, ...]


def through(op: CapturedOp, operands: Sequence[Order], length: int, free: Mapping[str, int] = {}) -> dict[str, int]:
    """The factors of an op that are in zigzag order -> elements for each position. Raises Mistyped if it minds.

    operands: orders of its operands. length: of the sequence. free: factors that no operand has, taken to be so.
    """
    rule = op.rule
    found = dict(free)
    for factors, orders in zip(rule.operands, operands, strict=False):
        for order in orders:
            factor, inner = _factor_of(factors[order.dim], rule, order.inner, length)
            if found.setdefault(factor, inner) != inner:
                raise Mistyped(f"factor {factor!r} is in two zigzag orders")
    for factor in found:
        if not rule.is_positionwise(factor):
            raise Mistyped(f"it minds the order of factor {factor!r}, which is in zigzag order")
    for position, (factors, orders) in enumerate(zip(rule.operands, operands, strict=False)):
        expected = orders_of(factors, rule, found)
        if expected != orders:
            raise Mistyped(
                f"operand {position} is in the order {orders or 'natural'}; expected {expected or 'natural'}"
            )
    if is_positional(op) and (QUERIES in found) != (KEYS in found):
        raise Mistyped("only its queries or only its keys are in zigzag order")
    return found


def is_positional(op: CapturedOp) -> bool:
    """Whether an op is an attention in which it matters who comes before whom."""
    if "ring" not in op.rule.lowered.values():
        return False
    given = op.arguments
    return bool(given.get("is_causal")) or given.get("kind") in ("causal", "sliding")


def orders_of(factors: TensorFactors, rule: FactorRule, found: Mapping[str, int]) -> Order:
    """Where factors in zigzag order are in a tensor."""
    orders = []
    for number, dim in enumerate(factors):
        for place, factor in enumerate(dim):
            if factor in found:
                orders.append(Zigzag(number, found[factor] * prod(rule.sizes[minor] for minor in dim[place + 1 :])))
    return tuple(orders)


def _factor_of(dim: DimFactors, rule: FactorRule, inner: int, length: int) -> tuple[str, int]:
    """The factor of a dimension that holds whole sequences, and its elements for each position."""
    stride = 1
    for factor in reversed(dim):
        size = rule.sizes[factor]
        if inner % stride == 0 and size % (inner // stride * length) == 0:
            return factor, inner // stride
        stride *= size
    raise Mistyped("it takes a sequence in zigzag order apart")
