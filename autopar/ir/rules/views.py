"""Views: the same elements under another shape.

view (b * s, h) -> (b, s, h)          (b s) h -> b s h
transpose(1, 2)                       d0 d1 d2 -> d0 d2 d1
expand (1, h) -> (b, h)               1 d1 -> d0 d1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Factors, Rule, aligned, dim_of, dims_of, numbered, sums, table


def reshape(call: Call) -> FactorRule | None:
    """Dimensions are cut into common refinements, major first."""
    (x,) = call.operands
    (result,) = call.results
    if x.dtype != result.dtype:
        return None  # the same bits read as another type
    factors = Factors()
    pair = refine(factors, x.shape, result.shape)
    if pair is None:
        return None
    return factors.rule([pair[0]], [pair[1]], linear=sums(call, [0]))


def refine(factors: Factors, before: Sequence[int], after: Sequence[int]) -> tuple[TensorFactors, TensorFactors] | None:
    """Factors of two shapes of the same elements. None if a dimension is empty.

    Groups of dimensions with equal products are refined together: (6, 4) -> (2, 12) runs over 2, 3, 4.
    Where no common refinement exists, as in (6, 4) -> (4, 6), only the common divisor of the first
    dimensions is a factor of both.
    """
    if prod(before) != prod(after) or not prod(before):
        return None
    old: list[DimFactors] = [()] * len(before)
    new: list[DimFactors] = [()] * len(after)
    left = [d for d, size in enumerate(before) if size > 1]
    right = [d for d, size in enumerate(after) if size > 1]
    while left:
        group_old, group_new = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[d] for d in group_old)) != (b := prod(after[d] for d in group_new)):
            if a < b:
                group_old.append(left.pop(0))
            else:
                group_new.append(right.pop(0))
        sizes = [before[d] for d in group_old], [after[d] for d in group_new]
        _refine_group(factors, *sizes, (group_old, group_new), (old, new))
    return tuple(old), tuple(new)


def _refine_group(
    factors: Factors,
    before: list[int],
    after: list[int],
    dims: tuple[list[int], list[int]],
    into: tuple[list[DimFactors], list[DimFactors]],
) -> None:
    total = prod(before)
    cuts = sorted({total, *_suffixes(before), *_suffixes(after)}, reverse=True)
    if all(large % small == 0 for large, small in pairwise(cuts)):
        names = {}
        for large, small in pairwise(cuts):
            (names[large],) = factors.dim(f"d{len(factors.sizes)}", large // small)
        for sizes, numbers, target in ((before, dims[0], into[0]), (after, dims[1], into[1])):
            for size, number, low in zip(sizes, numbers, _suffixes(sizes)):
                target[number] = tuple(names[c] for c in cuts if low < c <= low * size)
        return
    major = gcd(before[0], after[0])
    name = factors.dim(f"d{len(factors.sizes)}", major)
    for sizes, numbers, target in ((before, dims[0], into[0]), (after, dims[1], into[1])):
        target[numbers[0]] = name + factors.fresh(sizes[0] // major)
        for size, number in zip(sizes[1:], numbers[1:]):
            target[number] = factors.fresh(size)


def _suffixes(sizes: list[int]) -> list[int]:
    """Elements below each dimension: [2, 3, 4] -> [12, 4, 1]."""
    return [prod(sizes[position + 1 :]) for position in range(len(sizes))]


def _permuted(call: Call, order: Sequence[int]) -> FactorRule:
    x = call.operands[0]
    factors = Factors()
    operand = factors.dims(numbered(len(x.shape)), x.shape)
    return factors.rule([operand], [tuple(operand[d] for d in order)], linear=sums(call, [0]))


def permute(call: Call) -> FactorRule | None:
    """All dimensions in another order."""
    return _permuted(call, dims_of(call.bound()["dims"], len(call.operands[0].shape)))


def transpose(call: Call) -> FactorRule | None:
    """Two dimensions swapped; None without ``dim0``, as of a matrix."""
    rank = len(call.operands[0].shape)
    bound = call.bound()
    if "dim0" not in bound:
        return None
    first, second = dim_of(bound["dim0"], rank), dim_of(bound["dim1"], rank)
    order = list(range(rank))
    if rank:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def matrix_transpose(call: Call) -> FactorRule | None:
    """The last two dimensions swapped."""
    rank = len(call.operands[0].shape)
    order = list(range(rank))
    if rank >= 2:
        order[-2:] = [rank - 1, rank - 2]
    return _permuted(call, order)


def reverse_dims(call: Call) -> FactorRule | None:
    """All dimensions in reverse order."""
    return _permuted(call, range(len(call.operands[0].shape))[::-1])


def movedim(call: Call) -> FactorRule | None:
    """Dimensions moved to other positions, the rest in order."""
    rank = len(call.operands[0].shape)
    bound = call.bound()
    moved, places = dims_of(bound["source"], rank), dims_of(bound["destination"], rank)
    order = [-1] * rank
    for dim, place in zip(moved, places):
        order[place] = dim
    rest = iter(d for d in range(rank) if d not in moved)
    return _permuted(call, [d if d >= 0 else next(rest) for d in order])


def expand(call: Call) -> FactorRule | None:
    """A dimension that expands is a factor of the result alone."""
    (x,) = call.operands
    shape = call.results[0].shape
    factors = Factors()
    result = factors.dims(numbered(len(shape)), shape)
    operand = aligned(result, shape, x.shape)
    if operand is None:
        return None
    return factors.rule([operand], [result], linear=sums(call, [0]))


def repeat(call: Call) -> FactorRule | None:
    """Whole copies one after the other: (copies, dimension)."""
    (x,) = call.operands
    shape = call.results[0].shape
    factors = Factors()
    offset = len(shape) - len(x.shape)
    result: list[DimFactors] = []
    operand: list[DimFactors] = []
    for d, size in enumerate(shape):
        own = x.shape[d - offset] if d >= offset else 1
        if not own:
            return None
        inner = factors.dim(f"d{d}", own)
        result.append(factors.dim(f"r{d}", size // own) + inner)
        if d >= offset:
            operand.append(inner)
    return factors.rule([tuple(operand)], [tuple(result)], linear=sums(call, [0]))


def repeat_interleave(call: Call) -> FactorRule | None:
    """Each element several times: (dimension, copies)."""
    bound = call.bound()
    if call.overload != "self_int" or bound["dim"] is None:
        return None
    (x,) = call.operands
    dim = dim_of(bound["dim"], len(x.shape))
    factors = Factors()
    operand = factors.dims(numbered(len(x.shape)), x.shape)
    copies = factors.dim("copies", bound["repeats"], block=True)
    result = tuple(dims + copies if d == dim else dims for d, dims in enumerate(operand))
    # An explicit size of the result is that of the whole one.
    if bound["output_size"] is not None:
        factors.blocked.update(operand[dim])
    return factors.rule([operand], [result], linear=sums(call, [0]))


def complex_pairs(call: Call) -> FactorRule | None:
    """Complex numbers against pairs of real ones in a last dimension."""
    (x,) = call.operands
    factors = Factors()
    (result,) = call.results
    rank = min(len(x.shape), len(result.shape))
    shared = factors.dims(numbered(rank), x.shape[:rank])
    sides = [shared + tuple(factors.fresh(2) for _ in range(len(t.shape) - rank)) for t in (x, result)]
    return factors.rule(sides[:1], sides[1:], linear=[[0]])


def diagonal(call: Call) -> FactorRule | None:
    """A diagonal as a new last dimension, which is blocked, as are the two dimensions that it runs through."""
    (x,) = call.operands
    bound = call.bound()
    rank = len(x.shape)
    gone = {dim_of(bound["dim1"], rank), dim_of(bound["dim2"], rank)}
    factors = Factors()
    operand = tuple(factors.dim(f"d{d}", size, block=d in gone) for d, size in enumerate(x.shape))
    result = (*(dims for d, dims in enumerate(operand) if d not in gone), factors.fresh(call.results[0].shape[-1]))
    return factors.rule([operand], [result], linear=sums(call, [0]))


RULES: dict[str, Rule] = table(
    reshape,
    "view _unsafe_view reshape view_copy flatten ravel squeeze unsqueeze squeeze_copy unsqueeze_copy",
)
RULES.update(
    {
        "aten::permute": permute,
        "aten::transpose": transpose,
        "aten::t": reverse_dims,
        "aten::numpy_T": reverse_dims,
        "aten::mT": matrix_transpose,
        "aten::adjoint": matrix_transpose,
        "aten::movedim": movedim,
        "aten::expand": expand,
        "aten::broadcast_to": expand,
        "aten::repeat": repeat,
        "aten::tile": repeat,
        "aten::repeat_interleave": repeat_interleave,
        "aten::view_as_real": complex_pairs,
        "aten::view_as_complex": complex_pairs,
        "aten::diagonal": diagonal,
    }
)
