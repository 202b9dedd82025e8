"""Tensors that ops make of parameters alone: a scale 1 + w, a transposed matrix, the embedding of positions.

    w ── 1 + w ── norm ── ...       every rank of an axis has 1 + w; norm has a part of the batch

The norm's gradient of 1 + w is a summand there. A derivative is linear in the gradient, so that of 1 + w takes summands
to summands: they *pass* through the op, and are summed once a step with the gradients of parameters, instead of here
in every microbatch. That needs every user of 1 + w to give summands, and the op to be repeated on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from autopar.ir.analysis.batch_and_sequence import Roles
from autopar.ir.graph import CapturedModel, has_gradient_dtype, op_nodes, source, tensor_operands, tensor_results
from autopar.ir.placement import Layout, Partial, Replicate
from autopar.ir.rule import Assignment

# Derived ops in execution order -> the ops that use their results, with the operand positions.
DerivedUses = Mapping[fx.Node, Sequence[tuple[fx.Node, int]]]
# The mesh axes on which summands pass through derived ops.
Passing = Mapping[fx.Node, frozenset[int]]


def find_derived(captured: CapturedModel, roles: Roles) -> DerivedUses:
    """The ops that carry no batch and whose gradient flows into parameters alone. Linear in the graph."""
    trained = {name for name, parameter in captured.parameters.items() if parameter.requires_grad}
    flowing: set[fx.Node] = set()
    uses: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node in op_nodes(captured.graph):
        operands = [source(operand)[0] for operand in tensor_operands(node)]
        reached = [o for o in operands if o in flowing or (o.op == "placeholder" and o.name in trained)]
        for position, operand in enumerate(operands):
            if operand in uses:
                uses[operand].append((node, position))
        if not reached or not any(map(has_gradient_dtype, tensor_results(node))):
            continue
        flowing.add(node)
        linear = not roles.rules[node].nonlinear
        if linear and roles.batch.get(node) is None and all(o.op == "placeholder" or o in uses for o in reached):
            uses[node] = []
    return uses


def passing_axes(uses: DerivedUses, assignments: Mapping[fx.Node, Assignment], roles: Roles) -> Passing:
    """The mesh axes on which summands pass through each derived op."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(list(uses)):
        axes = {axis for axis, choice in enumerate(assignments[node]) if choice is None and uses[node]}
        for user, position in uses[node]:
            passing = found.get(user, frozenset())
            value, grad = roles.rules[user].operand_layout(position, assignments[user], passing)
            axes &= {axis for axis in axes if value[axis].is_replicate() and grad[axis] == Partial()}
        found[node] = frozenset(axes)
    return found


def left_to_sum(grad: Layout, passing: Collection[int]) -> Layout:
    """Layout of a user's gradient as the redistribution of what a derived op makes has to see it."""
    return tuple(Replicate() if axis in passing else placement for axis, placement in enumerate(grad))
