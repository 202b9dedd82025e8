"""Ops that compute each element of the result from the elements at its place.

add      d0 d1, d1 -> d0 d1
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, aligned, aten, numbered, numel, sums, table
from autopar.ir.torch_private import OpOverload


def pointwise(call: Call) -> FactorRule | None:
    """Operands broadcast to the result; every dimension of the result is a factor."""
    if not call.results:
        return None
    shape = call.results[0].shape
    if any(result.shape != shape for result in call.results):
        return None
    factors = Factors()
    result = factors.dims(numbered(len(shape)), shape)
    operands = [aligned(result, shape, operand.shape) for operand in call.operands]
    if any(operand is None for operand in operands):
        return None
    return factors.rule(
        [operand for operand in operands if operand is not None],
        [result] * len(call.results),
        linear=sums(call, *_linear(call)),
        flops=numel(shape) * (1 if call.name not in MOVES else 0),
    )


def _linear(call: Call) -> list[list[int]]:
    """Sets of operands in which a pointwise op is linear."""
    name, bound = call.name, call.bound()
    tensors = [operand.position for operand in call.operands]
    if name in UNARY_LINEAR:
        return [tensors] if len(tensors) == 1 else []
    if name in SUMS:
        return [tensors] if len(tensors) == 2 else []
    if name in PRODUCTS:
        return [[position] for position in tensors]
    if name in QUOTIENTS and bound.get("rounding_mode") is None:
        numerator = bound["self"]
        return [[numerator.position]] if isinstance(numerator, Operand) else []
    if name == "aten::where" and call.overload == "self":
        return [[bound["self"].position, bound["other"].position]]
    if name == "aten::where" and call.overload == "ScalarOther" and bound["other"] == 0:
        return [[bound["self"].position]]
    if name == "aten::where" and call.overload == "ScalarSelf" and bound["self"] == 0:
        return [[bound["other"].position]]
    if name == "aten::lerp":
        return [[bound["self"].position, bound["end"].position]]
    if name == "aten::masked_fill" and bound["value"] == 0:
        return [[bound["self"].position]]
    return []


# Linear in their only tensor.
UNARY_LINEAR = frozenset(
    aten(
        "alias clone contiguous detach lift_fresh lift_fresh_copy neg positive deg2rad rad2deg _to_copy to "
        "real imag conj_physical _conj resolve_conj resolve_neg"
    )
)
SUMS = frozenset({"aten::add", "aten::sub", "aten::rsub"})
PRODUCTS = frozenset({"aten::mul", "aten::multiply"})
QUOTIENTS = frozenset({"aten::div", "aten::true_divide", "aten::divide"})

# Copies and casts: no arithmetic.
MOVES = frozenset(aten("alias clone contiguous detach lift_fresh lift_fresh_copy _to_copy to copy")) | {
    "autopar::annotated"
}

# Pointwise ops that ATen does not tag as such. The tag (``torch.Tag.pointwise``) covers the rest.
UNTAGGED = (
    "where _to_copy alias clone contiguous copy detach lift_fresh lift_fresh_copy to type_as real imag _conj "
    "conj_physical resolve_conj resolve_neg __and__ __or__ __xor__ __lshift__ __rshift__ floor_divide "
    "true_divide divide multiply subtract not_equal greater greater_equal less less_equal negative "
    "absolute arccos arcsin arctan arctan2 log_sigmoid log_sigmoid_forward hardswish special_expit "
    "special_logit special_erf special_log1p special_expm1 special_xlogy special_gammaln special_digamma "
    "special_ndtr special_sinc special_exp2 float_power fix polar"
)


def annotated(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.composite.annotated``: a tensor in a layout that the user fixes."""
    rule = pointwise(call)
    return None if rule is None else replace(rule, linear=(), leads=True)


def is_pointwise(target: object) -> bool:
    """Whether ATen says that an op is pointwise and draws no random numbers."""
    return (
        isinstance(target, OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def glu(call: Call) -> FactorRule | None:
    """The halves of one dimension are gate and value."""
    (x,) = call.operands
    dim = call.bound()["dim"] % len(x.shape)
    factors = Factors()
    names = numbered(len(x.shape))
    operand = tuple(factors.fresh(size) if d == dim else factors.dim(names[d], size) for d, size in enumerate(x.shape))
    shape = call.results[0].shape
    result = tuple(factors.fresh(size) if d == dim else factors.dim(names[d], size) for d, size in enumerate(shape))
    return factors.rule([operand], [result], flops=2 * numel(shape))


def prelu(call: Call) -> FactorRule | None:
    """One slope, or one per channel (dimension 1)."""
    x, weight = call.operands
    factors = Factors()
    names = [f"d{d}" if d != 1 else "c" for d in range(len(x.shape))]
    dims = factors.dims(names, x.shape)
    per_channel = len(x.shape) > 1 and weight.shape == (x.shape[1],)
    if weight.shape not in ((), (1,)) and not per_channel:
        return None
    slopes = (dims[1],) if per_channel else tuple(() for _ in weight.shape)
    return factors.rule([dims, slopes], [dims], flops=numel(x.shape))


RULES: dict[str, Rule] = table(pointwise, UNTAGGED)
RULES.update({"aten::glu": glu, "aten::prelu": prelu, "autopar::annotated": annotated})
