"""Reading and writing at indices.

gather        d0 _1, d0 i -> d0 i              the dimension read from is blocked
take_along    d0 _1, d0 i -> d0 i              gather of operands that broadcast
index         _0 d1, i0 i1 -> i0 i1 d1         x[idx]: indexed dimensions are blocked
scatter_add   d0 _1, d0 _2, d0 _2 -> d0 _1
"""

from __future__ import annotations

import torch

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import (
    Factors,
    Rule,
    aligned,
    dim_of,
    numbered,
    numel,
    operand_factors,
    replicated_rule,
    sums,
)


def gather(call: Call) -> FactorRule | None:
    """``gather`` along a dimension, which is blocked in ``x``; None unless index and ``x`` have equal rank."""
    bound = call.bound()
    x, index = bound["self"], bound["index"]
    rank = len(x.shape)
    if len(index.shape) != rank or not rank:
        return None
    dim = dim_of(bound["dim"], rank)
    factors = Factors()
    read: list[DimFactors] = []
    out: list[DimFactors] = []
    for d in range(rank):
        if d == dim:
            read.append(factors.fresh(x.shape[d]))
            out.append(factors.dim("i", index.shape[d]))
        elif x.shape[d] == index.shape[d]:
            read.append(factors.dim(f"d{d}", x.shape[d]))
            out.append(read[-1])
        else:
            # The index covers only the first entries of this dimension.
            read.append(factors.fresh(x.shape[d]))
            out.append(factors.fresh(index.shape[d]))
    return factors.rule(
        [tuple(read), tuple(out)], [tuple(out)], linear=sums(call, [x.position]), flops=numel(index.shape)
    )


def take_along(call: Call) -> FactorRule | None:
    """Like gather, but that the operands broadcast in the dimensions that are not read along."""
    bound = call.bound()
    x, index, shape = bound["self"], bound["indices"], call.results[0].shape
    rank = len(shape)
    if bound["dim"] is None or len(x.shape) != rank or len(index.shape) != rank:
        return None
    dim = dim_of(bound["dim"], rank)
    factors = Factors()
    out = tuple(factors.dim("i" if d == dim else f"d{d}", size) for d, size in enumerate(shape))
    read = aligned(out, shape, (*x.shape[:dim], shape[dim], *x.shape[dim + 1 :]))
    at = aligned(out, shape, index.shape)
    if read is None or at is None:
        return None
    read = (*read[:dim], factors.fresh(x.shape[dim]), *read[dim + 1 :])
    return factors.rule([read, at], [out], linear=sums(call, [x.position]), flops=numel(shape))


def index_select(call: Call) -> FactorRule | None:
    """Entries of a dimension at an index of rank 1; the dimension is blocked, the index a factor of the result."""
    bound = call.bound()
    x, index = bound["self"], bound["index"]
    dim = dim_of(bound["dim"], len(x.shape))
    if not x.shape or len(index.shape) != 1:
        return None
    factors = Factors()
    i = factors.dim("i", index.shape[0])
    read = tuple(factors.fresh(s) if d == dim else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    out = tuple(i if d == dim else dims for d, dims in enumerate(read))
    return factors.rule([read, (i,)], [out], linear=sums(call, [x.position]), flops=numel(call.results[0].shape))


def index(call: Call) -> FactorRule | None:
    """``x[:, idx, jdx]``: index tensors broadcast; their dimensions stand where the indexed ones were, or first."""
    bound = call.bound()
    x, indices = bound["self"], bound["indices"]
    placed = _index_dims(x, indices)
    if placed is None:
        return None
    indexed, shape, start = placed
    factors = Factors()
    picks = factors.dims(numbered(len(shape), "i"), shape)
    read = tuple(factors.fresh(s) if d in indexed else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    kept = [dims for d, dims in enumerate(read) if d not in indexed]
    known: dict[int, TensorFactors] = {x.position: read}
    for item in indices:
        if isinstance(item, Operand):
            dims = aligned(picks, shape, item.shape)
            if dims is None:
                return None
            known[item.position] = dims
    result = (*kept[:start], *picks, *kept[start:])
    return factors.rule(
        operand_factors(call, known, factors),
        [result],
        linear=sums(call, [x.position]),
        flops=numel(call.results[0].shape),
    )


def _index_dims(x: Operand, indices: tuple[object, ...]) -> tuple[list[int], tuple[int, ...], int] | None:
    """Indexed dimensions, broadcast shape of the indices, and where it stands among the kept dimensions."""
    tensors = [item for item in indices if isinstance(item, Operand)]
    if not tensors or any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    indexed = [d for d, item in enumerate(indices) if isinstance(item, Operand)]
    shape = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    together = indexed[-1] - indexed[0] + 1 == len(indexed)
    return indexed, shape, indexed[0] if together else 0


def index_put(call: Call) -> FactorRule | None:
    """Dimensions that are not indexed are factors; writes along the others are not taken apart."""
    bound = call.bound()
    x, indices, values = bound["self"], bound["indices"], bound["values"]
    placed = _index_dims(x, indices)
    if placed is None:
        return None
    indexed, shape, start = placed
    factors = Factors()
    dims = tuple(factors.fresh(s) if d in indexed else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    kept = [d for d in range(len(x.shape)) if d not in indexed]
    order = [*kept[:start], *([None] * len(shape)), *kept[start:]]
    picks = iter(shape)
    target = [dims[d] if d is not None else () for d in order]
    sizes = [x.shape[d] if d is not None else next(picks) for d in order]
    offset = len(sizes) - len(values.shape)
    if offset < 0:
        return None
    written: list[DimFactors] = []
    for d, size in enumerate(values.shape):
        is_kept = order[offset + d] is not None
        if is_kept and size == sizes[offset + d]:
            written.append(target[offset + d])
        else:
            written.append(factors.fresh(size))
    known = {x.position: dims, values.position: tuple(written)}
    # Without accumulation the winner among equal indices is not defined, and may differ between ranks.
    linear = sums(call, [x.position, values.position]) if bound["accumulate"] else ()
    return factors.rule(operand_factors(call, known, factors), [dims], linear=linear, flops=numel(values.shape))


def scatter(call: Call) -> FactorRule | None:
    """Each line along ``dim`` for itself, in dimensions that index, source and result have alike."""
    bound = call.bound()
    x, index = bound["self"], bound["index"]
    source = bound.get("src")
    rank = len(x.shape)
    if len(index.shape) != rank or not rank:
        return None
    dim = dim_of(bound["dim"], rank)
    factors = Factors()
    shared = [
        d != dim and x.shape[d] == index.shape[d] and (not isinstance(source, Operand) or source.shape[d] == x.shape[d])
        for d in range(rank)
    ]

    def dims(operand: Operand) -> TensorFactors:
        return tuple(factors.dim(f"d{d}", s) if shared[d] else factors.fresh(s) for d, s in enumerate(operand.shape))

    known = {operand.position: dims(operand) for operand in call.operands}
    adds = call.name == "aten::scatter_add" or bound.get("reduce") in ("sum", "mean")
    return factors.rule(
        operand_factors(call, known, factors),
        [known[x.position]],
        linear=sums(call, [x.position, source.position]) if adds and isinstance(source, Operand) else (),
        flops=numel(index.shape),
    )


def masked_scatter(call: Call) -> FactorRule | None:
    """Where an element of ``source`` goes depends on the whole of the mask before it."""
    rule = replicated_rule(call)
    return Factors(dict(rule.sizes), set(rule.blocked)).rule(
        rule.operands, rule.results, flops=numel(call.results[0].shape)
    )


def index_add(call: Call) -> FactorRule | None:
    """``self`` with rows of ``source`` added or copied along ``dim``."""
    bound = call.bound()
    x, source = bound["self"], bound["source"]
    if len(x.shape) != len(source.shape) or not x.shape:
        return None
    dim = dim_of(bound["dim"], len(x.shape))
    factors = Factors()
    names = numbered(len(x.shape))
    dims = tuple(factors.fresh(s) if d == dim else factors.dim(names[d], s) for d, s in enumerate(x.shape))
    rows = tuple(factors.fresh(s) if d == dim else dims[d] for d, s in enumerate(source.shape))
    known = {x.position: dims, source.position: rows}
    return factors.rule(
        operand_factors(call, known, factors),
        [dims],
        linear=sums(call, [x.position, source.position]) if call.name == "aten::index_add" else (),
        flops=numel(source.shape),
    )


def bucketize(call: Call) -> FactorRule | None:
    """Every value for itself; the boundaries are whole."""
    bound = call.bound()
    x, boundaries = bound["self"], bound["boundaries"]
    if not isinstance(x, Operand):
        return None
    factors = Factors()
    dims = factors.dims(numbered(len(x.shape)), x.shape)
    known = {x.position: dims, boundaries.position: factors.whole(boundaries.shape)}
    return factors.rule(operand_factors(call, known, factors), [dims], flops=numel(x.shape) * 8)


RULES: dict[str, Rule] = {
    "aten::gather": gather,
    "aten::take_along_dim": take_along,
    "aten::index_select": index_select,
    "aten::index": index,
    "aten::_unsafe_index": index,
    "aten::index_put": index_put,
    "aten::_unsafe_index_put": index_put,
    "aten::scatter": scatter,
    "aten::scatter_add": scatter,
    "aten::scatter_reduce": scatter,
    "aten::masked_scatter": masked_scatter,
    "aten::index_add": index_add,
    "aten::index_copy": index_add,
    "aten::bucketize": bucketize,
}
