"""Look-ups of rows by index.

embedding       v h, d0 d1 -> d0 d1 h  v is summed and lowered: each rank looks up the rows it has
embedding_bag   v h, b l -> b h        likewise, but for a maximum; l is summed in a sum
"""

from __future__ import annotations

from autopar.ir.rule import FactorRule, TensorFactors
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Factors, Rule, numbered, numel, operand_factors, sums


def embedding(call: Call) -> FactorRule | None:
    """Look-up of rows of a matrix; None for sparse gradients, or scaled by the frequency of an index."""
    bound = call.bound()
    weight, indices = bound["weight"], bound["indices"]
    if bound["scale_grad_by_freq"] or bound["sparse"]:
        return None
    factors = Factors()
    v, h = factors.dim("v", weight.shape[0]), factors.dim("h", weight.shape[1])
    lead = factors.dims(numbered(len(indices.shape)), indices.shape)
    return factors.rule(
        [(v, h), lead],
        [(*lead, h)],
        summed="v",
        lowered={"v": "embedding"},
        linear=sums(call, [weight.position]),
        flops=numel(call.results[0].shape),
    )


def bag(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.composite.embedding_bag``. Of bags of any sizes, where one begins depends on all before it."""
    bound = call.bound()
    weight, indices, scale, offsets = (bound[n] for n in ("weight", "indices", "per_sample_weights", "offsets"))
    adds, is_sum, ragged = bound["mode"] != "max", bound["mode"] == "sum", offsets is not None
    factors = Factors()
    v, h = factors.dim("v", weight.shape[0], block=not adds), factors.dim("h", weight.shape[1])
    b = factors.dim("b", call.results[0].shape[0], block=ragged)
    rows: TensorFactors
    if ragged:
        rows = factors.whole(indices.shape)
    else:
        rows = (b, factors.dim("l", indices.shape[1], block=not is_sum))
    known: dict[int, TensorFactors] = {weight.position: (v, h), indices.position: rows}
    if scale is not None:
        known[scale.position] = rows
    return factors.rule(
        operand_factors(call, known, factors),
        [(b, h)],
        summed=("v", "l") if is_sum else ("v",) if adds else (),
        lowered={"v": "embedding_bag"} if adds else None,
        linear=sums(call, *[[o.position] for o in (weight, scale) if o is not None and adds]),
        flops=2 * numel(indices.shape) * weight.shape[1],
    )


def one_hot(call: Call) -> FactorRule | None:
    """One-hot encoding: a new last dimension, which is blocked; None if the number of classes depends on the data."""
    (x,) = call.operands
    factors = Factors()
    lead = factors.dims(numbered(len(x.shape)), x.shape)
    shape = call.results[0].shape
    # Without the number of classes it is taken from the data.
    if call.bound()["num_classes"] < 0:
        return None
    return factors.rule([lead], [(*lead, factors.fresh(shape[-1]))], flops=numel(shape))


RULES: dict[str, Rule] = {
    "aten::embedding": embedding,
    "autopar::embedding_bag": bag,
    "aten::one_hot": one_hot,
}
