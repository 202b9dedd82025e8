"""The kind of an op, and its floating point operations, forward and backward.

An op is a *contraction* if a factor is in two of its floating point operands and in no result, as ``k`` in
``m k, n k -> m n``. Its backward is one such product for each operand that needs a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import prod

from torch import fx

from autopar.cost_model.compute.local_products import factors_of
from autopar.ir.graph import has_gradient_dtype, tensor_operands
from autopar.ir.lowered.attention import is_attention
from autopar.ir.rule import FactorRule
from autopar.ir.torch_private import OpOverload

# Ops whose backward passes the gradient of the result, or a slice of it, through to the operands.
_ADDITIONS = frozenset({"add", "sub"})
_CONCATENATIONS = frozenset({"cat", "stack"})


def op_name(node: fx.Node) -> str:
    """Short name of an op: ``linear`` for ``aten.linear.default``, ``attention`` for ``composite.attention``."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return getattr(target, "__name__", str(target))


def is_contraction(node: fx.Node, rule: FactorRule) -> bool:
    """Whether the op multiplies two floating point operands over a common factor that no result has."""
    return bool(contracted_operands(node, rule))


def contracted_operands(node: fx.Node, rule: FactorRule) -> list[int]:
    """Positions of the operands that share a factor which no result has with another one; [] for none."""
    kept = factors_of(rule.results)
    own = {
        position: {f for dim in rule.operands[position] for f in dim} - kept
        for position, operand in enumerate(tensor_operands(node))
        if has_gradient_dtype(operand.meta["val"])
    }
    return [p for p, lost in own.items() if any(lost & other for q, other in own.items() if q != p)]


def training_flops(node: fx.Node, rule: FactorRule, needs_grad: AbstractSet[fx.Node] | None = None) -> float:
    """Floating point operations of one op in a step on the whole batch: forward, and the gradients that are wanted.

    What a kernel computes a second time is not counted. needs_grad: as in ``OpCost.of``.
    """
    contracted = contracted_operands(node, rule)
    passes = gradient_passes(node, contracted, wanted_gradients(node, needs_grad))
    return forward_flops(rule, contracted) * (1.0 + passes)


def forward_flops(rule: FactorRule, contracted: Sequence[int]) -> float:
    """Floating point operations of forward."""
    return rule.flops if rule.flops or not contracted else 2.0 * prod(rule.sizes.values())


def wanted_gradients(node: fx.Node, needs_grad: AbstractSet[fx.Node] | None) -> list[int]:
    """Positions of the operands whose gradient is computed."""
    if needs_grad is not None and node not in needs_grad:
        return []
    return [
        position
        for position, operand in enumerate(tensor_operands(node))
        if has_gradient_dtype(operand.meta["val"]) and (needs_grad is None or operand in needs_grad)
    ]


def accumulated_gradients(node: fx.Node, needs_grad: AbstractSet[fx.Node] | None, *, in_place: bool) -> list[int]:
    """Positions of the operands that have an earlier use, in the graph or in the op, so that autograd accumulates
    their gradients.

    in_place: the operands whose accumulation overwrites a gradient, or those whose accumulation makes a new tensor:
    where backward accumulates for the first time, and the op passes one gradient through to several operands.
    """
    operands, wanted = tensor_operands(node), wanted_gradients(node, needs_grad)
    uses = {position: [u for u in operands[position].users if wanted_gradients(u, needs_grad)] for position in wanted}
    last = {position for position in wanted if not any(node < user for user in uses[position])}
    out_of_place = last if len(gradients_passed_through(node, wanted)) > 1 else set()
    return [
        position
        for position in wanted
        if (position not in out_of_place) == in_place
        and (operands[position] in operands[:position] or any(user < node for user in uses[position]))
    ]


def gradients_passed_through(node: fx.Node, wanted: Sequence[int]) -> list[int]:
    """Positions of the ``wanted`` operands whose gradient is that of the result, or a slice of it."""
    name = op_name(node)
    if name in _CONCATENATIONS:
        return list(wanted)
    if name not in _ADDITIONS or node.kwargs.get("alpha", 1) != 1:
        return []
    operands, shape = tensor_operands(node), node.meta["val"].shape
    # A subtracted operand has the negative of the gradient, a broadcast operand its sum.
    return [
        position
        for position in wanted
        if operands[position].meta["val"].shape == shape and (name == "add" or operands[position] is node.args[0])
    ]


def gradient_passes(node: fx.Node, contracted: Sequence[int], wanted: Sequence[int]) -> float:
    """FLOPs of the gradients of the ``wanted`` operands, over those of forward."""
    if not wanted:
        return 0.0
    if is_attention(node):
        # Queries by keys, and that by values. Backward of the second: values, and scores for any other operand.
        queries, keys, values = (position in wanted for position in range(3))
        scores = any(position != 2 for position in wanted)
        return 0.5 * (queries + keys + values + scores)
    # A composite of several products (experts) has more operands, but still two products for each one.
    return min(2.0, len(set(contracted) & set(wanted))) if contracted else 2.0
