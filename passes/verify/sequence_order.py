"""Orders of sequences through ops: what is done alike at every position keeps the order that it is given.

    mul   d0 d1, d1 -> d0 d1          both have d1 in zigzag order, or neither; so has the result
    view  (d0 d1) -> d0 d1            within (d0 d1) as within d1

Attention whose queries and keys are both in zigzag order is a ring that is told so. Where each row is in the order of
its packed documents, the rows are followed beside the sequence: what is in such an order has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from math import prod
from typing import NamedTuple

from autopar.ir.lowered.attention import QUERIES
from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.passes.verify.terms import CapturedOp
from autopar.passes.verify.types import Mistyped, Sequence, Zigzag

KEYS = "t"
Order = tuple[Zigzag, ...]


class Located(NamedTuple):
    """A factor that is in zigzag order. inner: elements for each position within it. rows: the factor of the rows that
    have an order each, itself if it has them too; None if all are in one order."""

    inner: int
    rows: str | None = None


Orders = Mapping[str, Located]


def through(op: CapturedOp, operands: Items[Order], sequence: Sequence, free: Orders) -> dict[str, Located]:
    """The factors of an op that are in zigzag order, and how. Raises Mistyped if it minds.

    operands: orders of its operands. free: factors that no operand has, taken to be so.
    """
    rule = op.rule
    found = dict(free)
    for factors, orders in zip(rule.operands, operands, strict=False):
        for order in orders:
            factor, own = _located(factors, rule, order, sequence)
            if found.setdefault(factor, own) != own:
                raise Mistyped(f"factor {factor!r} is in two zigzag orders")
    for factor, own in found.items():
        for minded in {factor, own.rows or factor}:
            if not rule.is_positionwise(minded):
                raise Mistyped(f"it minds the order of factor {minded!r}, which is in zigzag order")
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
    """Whether an op is an attention in which it matters where queries and keys are."""
    if "ring" not in op.rule.lowered.values():
        return False
    given = op.arguments
    ordered = bool(given.get("is_causal")) or given.get("kind") in ("causal", "sliding")
    return ordered or given.get("documents") is not None


def orders_of(factors: TensorFactors, rule: FactorRule, found: Orders) -> Order:
    """Where factors in zigzag order are in a tensor. Raises Mistyped if it does not have the rows of one."""
    orders = []
    for number, dim in enumerate(factors):
        for place, factor in enumerate(dim):
            if factor in found:
                inner, rows = found[factor]
                elements = inner * prod(rule.sizes[minor] for minor in dim[place + 1 :])
                orders.append(
                    Zigzag(number, elements, None if rows is None else _dim_of(factors, rule, number, factor, rows))
                )
    return tuple(orders)


def _dim_of(factors: TensorFactors, rule: FactorRule, number: int, factor: str, rows: str) -> int:
    """The dimension of a tensor with ``rows``, of the sequence in ``factor`` of dimension ``number``."""
    dim = _long(factors[number], rule)
    if dim[0] == rows == factor or dim[:2] == [rows, factor]:
        return number
    for other, dim in enumerate(_long(dim, rule) for dim in factors):
        if dim == [rows]:
            return other
    raise Mistyped(f"a tensor has factor {factor!r}, which is in an order for each row, and not the rows {rows!r}")


def _located(factors: TensorFactors, rule: FactorRule, order: Zigzag, sequence: Sequence) -> tuple[str, Located]:
    """The factor that an operand's sequence is, and that of its rows."""
    factor, inner = _factor_of(factors[order.dim], rule, order.inner, sequence.length)
    if sequence.num_rows == 1:
        return factor, Located(inner)
    assert order.rows is not None
    dim, num_rows = _long(factors[order.rows], rule), sequence.num_rows
    if order.rows != order.dim:
        fits = len(dim) == 1 and rule.sizes[dim[0]] == num_rows
    elif dim[0] == factor:
        fits = rule.sizes[factor] == num_rows * sequence.length * inner
    else:
        fits = dim[1] == factor and rule.sizes[dim[0]] == num_rows and rule.sizes[factor] == sequence.length * inner
    if not fits:
        raise Mistyped("it takes the rows apart that have an order each")
    return factor, Located(inner, dim[0])


def free_orders(op: CapturedOp, sequence: Sequence) -> list[dict[str, Located]]:
    """The ways in which factors that no operand has may be in zigzag order."""
    rule = op.rule
    held = {f for tensor in rule.operands for dim in tensor for f in dim}
    found: list[dict[str, Located]] = [{}]
    for factor, size in rule.sizes.items():
        if factor in held | rule.blocked or size != sequence.length:
            continue
        rows = [f for f, other in rule.sizes.items() if f != factor and other == sequence.num_rows]
        ways = [Located(1)] if sequence.num_rows == 1 else [Located(1, own) for own in rows]
        found += [{**others, factor: way} for others in found for way in ways]
    return found


def _long(dim: DimFactors, rule: FactorRule) -> list[str]:
    """The factors of a dimension that are longer than 1."""
    return [factor for factor in dim if rule.sizes[factor] > 1]


def _factor_of(dim: DimFactors, rule: FactorRule, inner: int, length: int) -> tuple[str, int]:
    """The factor of a dimension that holds whole sequences, and its elements for each position."""
    stride = 1
    for factor in reversed(dim):
        size = rule.sizes[factor]
        if inner % stride == 0 and size % (inner // stride * length) == 0:
            return factor, inner // stride
        stride *= size
    raise Mistyped("it takes a sequence in zigzag order apart")
