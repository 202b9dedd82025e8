"""Look-ups of rows by index.

embedding   v h, d0 d1 -> d0 d1 h      v is summed and lowered: each rank looks up the rows it has
"""

from __future__ import annotations

from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Factors, Rule, numbered, numel, sums


def embedding(call: Call) -> FactorRule | None:
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


def one_hot(call: Call) -> FactorRule | None:
    (x,) = call.operands
    factors = Factors()
    lead = factors.dims(numbered(len(x.shape)), x.shape)
    shape = call.results[0].shape
    # Without the number of classes it is taken from the data.
    if call.bound()["num_classes"] < 0:
        return None
    return factors.rule([lead], [(*lead, factors.fresh(shape[-1]))], flops=numel(shape))


RULES: dict[str, Rule] = {"aten::embedding": embedding, "aten::one_hot": one_hot}
