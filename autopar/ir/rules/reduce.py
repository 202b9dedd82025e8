"""Reductions over dimensions.

sum      d0 d1 -> d0     d1 is summed
mean     d0 d1 -> d0     d1 is summed and lowered: each rank's mean counts 1 / ranks
amax     d0 d1 -> d0     d1 is blocked
"""

from __future__ import annotations

from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, dims_of, numbered, numel, sums, table


def _reduce(call: Call, kind: str) -> FactorRule | None:
    bound = call.bound()
    x = bound.get("self", bound.get("input"))
    if not isinstance(x, Operand) or len(call.operands) != 1:
        return None
    rank = len(x.shape)
    dims = dims_of(bound.get("dim", bound.get("axis")), rank)
    factors = Factors()
    names = numbered(rank)
    operand = tuple(factors.dim(names[d], size, block=d in dims and kind == "other") for d, size in enumerate(x.shape))
    kept = tuple(operand[d] for d in range(rank) if d not in dims)
    full = tuple(() if d in dims else operand[d] for d in range(rank))
    results = []
    for result in call.results:
        if len(result.shape) == rank:
            results.append(full)
        elif len(result.shape) == len(kept):
            results.append(kept)
        else:
            return None
    reduced = [names[d] for d in dims]
    return factors.rule(
        [operand],
        results,
        summed=reduced if kind != "other" else (),
        lowered=dict.fromkeys(reduced, "mean") if kind == "mean" else None,
        linear=sums(call, [x.position]) if kind != "other" else (),
        flops=numel(x.shape),
    )


def total(call: Call) -> FactorRule | None:
    """A sum: reduced dimensions are summed factors."""
    return _reduce(call, "sum")


def mean(call: Call) -> FactorRule | None:
    """A mean: reduced dimensions are summed and lowered."""
    return _reduce(call, "mean")


def other(call: Call) -> FactorRule | None:
    """A reduction that is no sum: reduced dimensions are blocked."""
    return _reduce(call, "other")


def count_nonzero(call: Call) -> FactorRule | None:
    """A sum, but not a linear one."""
    rule = _reduce(call, "sum")
    if rule is None:
        return None
    return FactorRule(
        operands=rule.operands, results=rule.results, sizes=rule.sizes, summed=rule.summed, flops=rule.flops
    )


def histc(call: Call) -> FactorRule | None:
    """Counts of fixed bins add up; with automatic limits (min == max) every element matters for all."""
    bound = call.bound()
    x = bound["self"]
    factors = Factors()
    fixed = bound["min"] != bound["max"]
    names = numbered(len(x.shape))
    operand = tuple(factors.dim(n, size, block=not fixed) for n, size in zip(names, x.shape))
    return factors.rule(
        [operand],
        [factors.whole(call.results[0].shape)],
        summed=names if fixed else (),
        flops=numel(x.shape),
    )


RULES: dict[str, Rule] = {
    "aten::sum": total,
    "aten::mean": mean,
    "aten::count_nonzero": count_nonzero,
    "aten::histc": histc,
}
RULES.update(
    table(
        other,
        "all amax amin aminmax any argmax argmin linalg_vector_norm logsumexp max min median nanmedian nanmean "
        "nansum norm prod std std_mean var var_mean",
    )
)
