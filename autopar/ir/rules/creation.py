"""Tensors made from nothing but sizes and numbers.

full, zeros      -> d0 d1                   any piece is as good as any other of its size
zeros_like       d0 d1 -> d0 d1
arange           -> _0                      never sharded: a piece would have to know where it starts
"""

from __future__ import annotations

from autopar.ir.rule import FactorRule
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Factors, Rule, numbered, numel, replicated_rule, table


def filled(call: Call) -> FactorRule | None:
    """Equal values everywhere; operands give only dtype and device, or a value without dimensions."""
    shape = call.results[0].shape
    factors = Factors()
    result = factors.dims(numbered(len(shape)), shape)
    return factors.rule([factors.whole(o.shape) for o in call.operands], [result], flops=numel(shape))


def filled_like(call: Call) -> FactorRule | None:
    """A tensor of the shape of the first operand; its dimensions are factors, other operands whole."""
    x, *others = call.operands
    if call.results[0].shape != x.shape:
        return None
    factors = Factors()
    dims = factors.dims(numbered(len(x.shape)), x.shape)
    return factors.rule([dims, *(factors.whole(o.shape) for o in others)], [dims], flops=numel(x.shape))


RULES: dict[str, Rule] = {
    **table(filled, "full zeros ones empty new_full new_zeros new_ones new_empty scalar_tensor empty_permuted"),
    **table(filled_like, "full_like zeros_like ones_like empty_like fill"),
    **table(replicated_rule, "arange linspace logspace eye tril_indices triu_indices bincount"),
}
