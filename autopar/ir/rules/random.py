"""Ops that draw random numbers.

    dropout   d0 d1 -> d0 d1       "*" is lowered: equal shards need equal numbers, different ones different

Each dimension of the result is a factor. Whether an axis shards the op or not, its ranks' generators have to
agree or differ as their shards do: the whole op is lowered.
"""

from __future__ import annotations

from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, aligned, numbered, numel, table


def dropout(call: Call) -> FactorRule | None:
    """Random unless nothing is dropped."""
    bound = call.bound()
    active = bound["p"] > 0 and bound.get("train", True) is not False
    return _random(call, active=active)


def leaky(call: Call) -> FactorRule | None:
    """A slope that is drawn for each element in training, and is fixed otherwise."""
    return _random(call, active=bool(call.bound()["training"]))


def draw(call: Call) -> FactorRule | None:
    """An op that always draws random numbers."""
    return _random(call, active=True)


def _random(call: Call, *, active: bool) -> FactorRule | None:
    shape = call.results[0].shape
    if any(result.shape != shape for result in call.results):
        return None
    factors = Factors()
    dims = factors.dims(numbered(len(shape)), shape)
    operands = [aligned(dims, shape, operand.shape) for operand in call.operands]
    if any(operand is None for operand in operands):
        return None
    return factors.rule(
        [operand for operand in operands if operand is not None],
        [dims] * len(call.results),
        lowered={"*": "random"} if active else None,
        flops=4 * numel(shape),
    )


def channel_dropout(call: Call) -> FactorRule | None:
    """Whole channels are dropped: one number per sample and channel."""
    bound = call.bound()
    x = bound["input"]
    if not isinstance(x, Operand) or len(x.shape) < 2:
        return None
    factors = Factors()
    dims = (factors.dim("b", x.shape[0]), factors.dim("c", x.shape[1]), *factors.whole(x.shape[2:]))
    active = bound["p"] > 0 and bound["train"]
    return factors.rule([dims], [dims], lowered={"*": "random"} if active else None, flops=numel(x.shape))


RULES: dict[str, Rule] = {
    "autopar::dropout": dropout,
    "aten::dropout": dropout,
    "aten::native_dropout": dropout,
    "aten::alpha_dropout": dropout,
    "aten::feature_dropout": channel_dropout,
    "aten::feature_alpha_dropout": channel_dropout,
    "aten::rrelu": leaky,
}
RULES.update(
    table(
        draw,
        "bernoulli rand randn randint rand_like randn_like randint_like normal normal_functional uniform "
        "exponential geometric log_normal cauchy poisson rrelu_with_noise_functional",
    )
)
