"""Factor rules of ATen and composite ops, one file per family of ops.

``rule_for(node)`` is the only entry. Operands of a rule follow ``graph.tensor_operands``, results
``graph.tensor_results``. A ``getitem`` node is no op: it names a result of an op with several, has the layout
of that result, and no rule; ``graph.source`` looks through it.

Factors are named after what they are where the op knows (``k`` and ``n`` of a linear, heads ``h`` of an
attention, vocabulary ``v``, ``experts``) and after the dimension otherwise (``d0``, ``d1``); ``_3`` is never
sharded. Dimensions of size 1 have no factor.

Lowerings (``FactorRule.lowered``). The local op on the shards alone would be wrong; the pass that shards the
graph has to do, for a factor sharded over some mesh axes:

    mean            divide the local result by the product of the axis sizes (the result is Partial).
    bias            the added operand (bias of linear, conv; ``self`` of addmm) must be added by one rank only, or
                    divided by the product of the axis sizes on each (the result is Partial).
    embedding       look up the indices inside the local rows, zeros for the others (the result is Partial).
    embedding_bag   likewise, each row as often as it counts (the result is Partial).
    cross_entropy   classes: maximum and sum of exponentials over the axes (the result is Replicate).
    batch_norm      means and variances over the axes, forward and backward (statistics are Replicate).
    attention       causal and sliding masks of local queries start at the position of the first one; a dropout
                    inside is treated as "random".
    ring            keys and values go round the ranks that share queries and keys (``s&t``).
    random          ranks with different shards draw different numbers, ranks with equal ones the same.

The pseudo factor ``*`` in ``lowered`` asks for the lowering even where no factor is sharded: replicated ranks
have to draw the same random numbers.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache

from torch import fx

from autopar.ir.autograd.function_op import FunctionOp, is_own
from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import is_getitem
from autopar.ir.rule import FactorRule
from autopar.ir.rules import (
    arrange,
    attention,
    conv,
    creation,
    embedding,
    fourier,
    indexing,
    loss,
    matmul,
    moe,
    norm,
    pointwise,
    random,
    recurrent,
    reduce,
    scan,
    views,
)
from autopar.ir.rules.call import Call, call_of
from autopar.ir.rules.factors import Rule, replicated_rule
from autopar.ir.rules.functions import function_rule, is_linear
from autopar.ir.rules.probe import probe

__all__ = ["RULES", "MissingRuleWarning", "repeat_warnings", "rule_for", "rule_of_call"]

RULES: dict[str, Rule] = {}
for _family in (
    pointwise, reduce, matmul, attention, norm, embedding, indexing, arrange, views, conv, loss, random, creation, moe,
    recurrent, fourier, scan,
):  # fmt: skip
    RULES.update(_family.RULES)


# Kinds of ops without a rule that a warning has named.
_SAID: set[str] = set()


class MissingRuleWarning(UserWarning):
    """An op has no rule: it was probed, or is repeated on every rank."""


def rule_for(node: fx.Node) -> FactorRule:
    """The factor rule of an op, on global shapes. Equal ops share one rule object.

    An op without a rule is probed, and repeated on every rank if that tells nothing; a warning names it, once for all
    ops of its kind.
    """
    if node.op != "call_function" or is_getitem(node):
        raise UnsupportedOp(
            f"{node.name}: only ops have rules, this is a {'getitem' if is_getitem(node) else node.op} node.\n"
            "  try: autopar.ir.graph.source(node), which finds the op and the result it names"
        )
    call = call_of(node)
    rule, found = rule_of_call(call)
    if not found:
        factors = ", ".join(rule.shardable())
        outcome = f"probing found that it shards on {factors}" if factors else "every rank repeats it"
        if call.name not in _SAID:
            _SAID.add(call.name)
            where = node.meta.get("source", "no source line")
            text = f"no rule for {call.name} ({node.name}, {where}): {outcome}; priced by its bytes and {_work(rule)}"
            warnings.warn(text, MissingRuleWarning, stacklevel=2)
    return rule


def _work(rule: FactorRule) -> str:
    """Estimated operations of an op: of its elements, and of products with its matrices if it has any."""
    return f"an estimate of {rule.flops:.3g} FLOPs"


def repeat_warnings() -> None:
    """Name ops without a rule again, for another model."""
    _SAID.clear()


@lru_cache(maxsize=1 << 16)
def rule_of_call(call: Call) -> tuple[FactorRule, bool]:
    """The rule of a signature, and whether a written rule covers it."""
    if isinstance(call.target, FunctionOp) and not call.opaque:
        return function_rule(call)
    known = known_rule(call)
    if known is not None:
        return known, True
    rule = probe(call) or replicated_rule(call)
    # An op of the user's may have a backward of its own, as an autograd function has.
    return (replace(rule, nonlinear=not is_linear(call)) if is_own(call.target) else rule), False


def known_rule(call: Call) -> FactorRule | None:
    """The written rule of a signature, if there is one that covers its arguments."""
    if call.opaque:
        return None
    if not call.results:
        return replicated_rule(call)
    if any(0 in tensor.shape for tensor in call.operands):
        return replicated_rule(call)
    if pointwise.is_pointwise(call.target):
        return pointwise.pointwise(call)
    rule = RULES.get(call.name)
    return rule(call) if rule is not None else None
