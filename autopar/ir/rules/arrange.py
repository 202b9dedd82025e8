"""Ops that put tensors together, take them apart, or work along one dimension, which is blocked.

cat (dim 1)     d0 _1, d0 _2 -> d0 _3
split (dim 1)   d0 _1 -> d0 _2, d0 _3
slice (step 2)  d0 (d1 _2) -> d0 d1      every second entry, of gates and values that take turns
cumsum, sort    d0 d1 -> d0 d1           d1 is blocked
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, aligned, dim_of, dims_of, numbered, numel, sums, table


def along(
    call: Call, dims: Iterable[int], *, linear: Sequence[Sequence[int]] = (), flops: float = 0.0
) -> FactorRule | None:
    """All tensors have the same dimensions as factors except ``dims``, which are whole in each."""
    first = call.operands[0]
    rank = len(first.shape)
    apart = set(dims)
    factors = Factors()
    names = numbered(rank)

    def describe(shape: tuple[int, ...]) -> TensorFactors | None:
        if len(shape) != rank or any(s != t for d, (s, t) in enumerate(zip(shape, first.shape)) if d not in apart):
            return None
        return tuple(factors.fresh(size) if d in apart else factors.dim(names[d], size) for d, size in enumerate(shape))

    operands = [describe(operand.shape) for operand in call.operands]
    results = [describe(result.shape) for result in call.results]
    if None in operands or None in results:
        return None
    return factors.rule(
        [o for o in operands if o is not None],
        [r for r in results if r is not None],
        linear=sums(call, *linear),
        flops=flops,
    )


def cat(call: Call) -> FactorRule | None:
    """Concatenation: the dimension is blocked in every operand and in the result, the others are shared factors."""
    rank = len(call.operands[0].shape)
    return along(call, [dim_of(call.bound()["dim"], rank)], linear=[[o.position for o in call.operands]])


def stack(call: Call) -> FactorRule | None:
    """A new dimension, blocked in the result; the dimensions of the operands are shared factors."""
    x = call.operands[0]
    dim = dim_of(call.bound()["dim"], len(x.shape) + 1)
    factors = Factors()
    dims = factors.dims(numbered(len(x.shape)), x.shape)
    result = (*dims[:dim], factors.fresh(len(call.operands)), *dims[dim:])
    return factors.rule([dims] * len(call.operands), [result], linear=sums(call, range(len(call.operands))))


def split(call: Call) -> FactorRule | None:
    """split, chunk, slice, narrow, pieces with the rank of the operand."""
    x = call.operands[0]
    dim = dim_of(call.bound()["dim"], len(x.shape))
    if len(call.operands) != 1:
        return None
    if call.name == "aten::slice" and call.bound()["step"] > 1:
        return _every(call, x, dim)
    # A piece that is everything, asked for in a way that holds for a shard too.
    whole = call.name in ("aten::slice", "aten::split", "aten::chunk") and call.results[0].shape == x.shape
    return along(call, () if whole else [dim], linear=[[0]])


def _every(call: Call, x: Operand, dim: int) -> FactorRule | None:
    """One entry out of every ``step``, to the end: pieces of the dimension that are multiples of it are alike."""
    bound = call.bound()
    size, step, start, end = x.shape[dim], bound["step"], bound["start"] or 0, bound["end"]
    if size % step or not 0 <= start < step or (end is not None and end < size):
        return along(call, [dim], linear=[[0]])
    factors = Factors()
    dims = factors.dims(numbered(len(x.shape)), call.results[0].shape)
    turns = factors.fresh(step)
    operand = tuple(own + turns if d == dim else own for d, own in enumerate(dims))
    return factors.rule([operand], [dims], linear=sums(call, [0]))


def select(call: Call) -> FactorRule | None:
    """select, unbind: the dimension goes."""
    (x,) = call.operands
    dim = dim_of(call.bound()["dim"], len(x.shape))
    factors = Factors()
    operand = tuple(factors.fresh(s) if d == dim else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    result = (*operand[:dim], *operand[dim + 1 :])
    return factors.rule([operand], [result] * len(call.results), linear=sums(call, [0]))


def slice_scatter(call: Call) -> FactorRule | None:
    """``x`` with a slice of one dimension written from ``src``; that dimension is blocked."""
    return along(call, [dim_of(call.bound()["dim"], len(call.operands[0].shape))], linear=[[0, 1]])


def select_scatter(call: Call) -> FactorRule | None:
    """``x`` with one entry of a dimension written from ``src``, which lacks the dimension; it is blocked."""
    x, _ = call.operands
    dim = dim_of(call.bound()["dim"], len(x.shape))
    factors = Factors()
    dims = tuple(factors.fresh(s) if d == dim else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    return factors.rule([dims, (*dims[:dim], *dims[dim + 1 :])], [dims], linear=sums(call, [0, 1]))


def diagonal_scatter(call: Call) -> FactorRule | None:
    """``x`` with a diagonal written from ``src``; the two dimensions of the diagonal are blocked."""
    x, _ = call.operands
    bound = call.bound()
    blocked = {dim_of(bound["dim1"], len(x.shape)), dim_of(bound["dim2"], len(x.shape))}
    factors = Factors()
    dims = tuple(factors.fresh(s) if d in blocked else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    kept = tuple(own for d, own in enumerate(dims) if d not in blocked)
    diagonal = (*kept, factors.fresh(call.operands[1].shape[-1]))
    return factors.rule([dims, diagonal], [dims], linear=sums(call, [0, 1]))


def pad(call: Call) -> FactorRule | None:
    """Padded dimensions are blocked. Amounts come in pairs from the last dimension on."""
    (x,) = call.operands
    bound = call.bound()
    rank, amounts = len(x.shape), bound["pad" if "pad" in bound else "padding"]
    padded = [rank - 1 - n // 2 for n in range(0, len(amounts), 2) if amounts[n] or amounts[n + 1]]
    constant = bound.get("mode", "constant") == "constant" and "value" in bound
    zero = not constant or not bound["value"]
    return along(call, padded, linear=[[0]] if zero else ())


def flip(call: Call) -> FactorRule | None:
    """Reversal of dimensions, which are blocked; no ``dims`` means all."""
    rank = len(call.operands[0].shape)
    return along(call, dims_of(call.bound()["dims"], rank) if call.bound()["dims"] else (), linear=[[0]])


def roll(call: Call) -> FactorRule | None:
    """Without dimensions it rolls the flattened tensor."""
    rank = len(call.operands[0].shape)
    return along(call, dims_of(call.bound()["dims"], rank), linear=[[0]])


def triangle(call: Call) -> FactorRule | None:
    """tril, triu."""
    (x,) = call.operands
    rank = len(x.shape)
    return along(call, [rank - 2, rank - 1], linear=[[0]], flops=numel(x.shape))


def scan(call: Call) -> FactorRule | None:
    """Each line along ``dim`` for itself; results keep the other dimensions."""
    x = call.operands[0]
    bound = call.bound()
    if not x.shape or len(call.operands) != 1:
        return None
    linear = [[0]] if call.name in ("aten::cumsum",) else ()
    rank = len(x.shape)
    if any(len(result.shape) != rank for result in call.results):
        return select(call)
    return along(call, [dim_of(bound["dim"], rank)], linear=linear, flops=numel(x.shape) * 2)


def diff(call: Call) -> FactorRule | None:
    """Differences along a dimension, which is blocked."""
    x = call.operands[0]
    linear = [[o.position for o in call.operands]]
    return along(call, [dim_of(call.bound()["dim"], len(x.shape))], linear=linear, flops=numel(x.shape))


def cosine_similarity(call: Call) -> FactorRule | None:
    """Cosine similarity along a dimension, which is blocked and absent from the result; operands broadcast."""
    bound = call.bound()
    x, y = bound["x1"], bound["x2"]
    if len(x.shape) != len(y.shape):
        return None
    dim = dim_of(bound["dim"], len(x.shape))
    shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape))
    factors = Factors()
    dims = tuple(factors.dim(f"d{d}", s, block=d == dim) for d, s in enumerate(shape))
    left, right = aligned(dims, shape, x.shape), aligned(dims, shape, y.shape)
    if left is None or right is None:
        return None
    return factors.rule([left, right], [(*dims[:dim], *dims[dim + 1 :])], flops=6 * numel(shape))


def unfold(call: Call) -> FactorRule | None:
    """Sliding windows of one dimension, in a new last one."""
    (x,) = call.operands
    bound = call.bound()
    if "dimension" not in bound or not isinstance(x, Operand):
        return None
    dim = dim_of(bound["dimension"], len(x.shape))
    shape = call.results[0].shape
    factors = Factors()
    operand = tuple(factors.fresh(s) if d == dim else factors.dim(f"d{d}", s) for d, s in enumerate(x.shape))
    result = tuple(factors.fresh(shape[d]) if d == dim else dims for d, dims in enumerate(operand))
    return factors.rule([operand], [(*result, factors.fresh(shape[-1]))], linear=sums(call, [0]))


RULES: dict[str, Rule] = {
    "aten::cat": cat,
    "aten::concat": cat,
    "aten::stack": stack,
    "aten::select": select,
    "aten::select_copy": select,
    "aten::unbind": select,
    "aten::slice_scatter": slice_scatter,
    "aten::select_scatter": select_scatter,
    "aten::diagonal_scatter": diagonal_scatter,
    "aten::flip": flip,
    "aten::roll": roll,
    "aten::tril": triangle,
    "aten::triu": triangle,
    "aten::diff": diff,
    "aten::cosine_similarity": cosine_similarity,
    "aten::unfold": unfold,
}
RULES |= table(
    split,
    "split split_with_sizes split_copy split_with_sizes_copy chunk tensor_split unsafe_split unsafe_chunk "
    "unsafe_split_with_sizes slice slice_copy narrow narrow_copy",
)
RULES |= table(
    pad,
    "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d",
)
RULES |= table(scan, "cumsum cumprod logcumsumexp cummax cummin sort argsort topk kthvalue mode")
