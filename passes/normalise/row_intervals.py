"""Masks of which every query sees one interval of the keys, known without looking at their elements.

A comparison of something that varies along the queries alone with something that does not decrease along the keys, as
``key <= query`` or ``document of key == document of query``, is such a mask, and so is a conjunction of them. Two
binary searches per query find the interval: exact at any length, in time that grows with the length and not with its
square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopar.ir.building import shape_of
from autopar.passes.normalise.constants import ConstantEvaluator

aten = torch.ops.aten

# Per comparison: the one that says the same with its operands swapped.
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_COMPARISONS = {getattr(aten, name).Tensor: name for name in _MIRRORED}


class RowIntervals(NamedTuple):
    """The keys ``start`` to ``stop``, exclusive, that each query sees: integers, (queries,)."""

    start: Tensor
    stop: Tensor

    def is_full(self, keys: int) -> bool:
        """Whether every query sees every key."""
        return bool((self.start <= 0).all() and (self.stop >= keys).all())

    def is_window(self, window: int) -> bool:
        """Whether every query sees its own position and up to ``window`` - 1 before it, and no others."""
        position = torch.arange(len(self.start))
        return bool(
            torch.equal(self.start, (position - window + 1).clamp_(min=0)) and torch.equal(self.stop, position + 1)
        )


def row_intervals(
    parts: Sequence[fx.Node], queries: int, keys: int, evaluator: ConstantEvaluator
) -> RowIntervals | None:
    """What the queries see under all of the constant conditions ``parts``; None where it may be no interval."""
    start, stop = torch.zeros(queries, dtype=torch.long), torch.full((queries,), keys)
    for part in parts:
        own = _of_condition(part, queries, keys, evaluator)
        if own is None:
            return None
        start, stop = torch.maximum(start, own.start), torch.minimum(stop, own.stop)
    return RowIntervals(start, stop)


def _of_condition(part: fx.Node, queries: int, keys: int, evaluator: ConstantEvaluator) -> RowIntervals | None:
    rank = len(shape_of(part))
    if len(evaluator.uniform(part)) == rank and part.meta["val"].dtype == torch.bool:
        seen = keys * bool(evaluator.evaluate(part, ((0, 1),) * rank))
        return RowIntervals(torch.zeros(queries, dtype=torch.long), torch.full((queries,), seen))
    if part.target not in _COMPARISONS:
        return None
    comparison = _COMPARISONS[part.target]
    left, right = (a for a in part.args if isinstance(a, fx.Node))
    of_keys, of_queries = _line(left, 1, keys, evaluator), _line(right, 2, queries, evaluator)
    if of_keys is None or of_queries is None:
        of_keys, of_queries = _line(right, 1, keys, evaluator), _line(left, 2, queries, evaluator)
        comparison = _MIRRORED[comparison]
    if of_keys is None or of_queries is None or not bool((of_keys[1:] >= of_keys[:-1]).all()):
        return None
    before = torch.searchsorted(of_keys, of_queries)  # keys that are less
    through = torch.searchsorted(of_keys, of_queries, right=True)  # keys that are less or equal
    none, all_of_them = torch.zeros_like(before), torch.full_like(before, keys)
    return {
        "le": RowIntervals(none, through),
        "lt": RowIntervals(none, before),
        "ge": RowIntervals(before, all_of_them),
        "gt": RowIntervals(through, all_of_them),
        "eq": RowIntervals(before, through),
    }[comparison]


def _line(node: fx.Node, dim: int, size: int, evaluator: ConstantEvaluator) -> Tensor | None:
    """The integers of a value along dimension ``dim`` from its last one, (size,); None where it varies along others."""
    shape, value = shape_of(node), node.meta["val"]
    along = len(shape) - dim
    varies = set(range(len(shape))) - evaluator.uniform(node)
    if varies - {along} or value.is_floating_point() or value.is_complex():
        return None
    if varies and shape[along] != size:
        return None
    line = evaluator.evaluate(node, tuple((0, size if d in varies else 1) for d in range(len(shape))))
    return line.flatten().long().expand(size).contiguous()
