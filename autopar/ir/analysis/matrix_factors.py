"""Factors of the matrices that ops read, and which of them are experts: of a mixture of experts, of a stack of matrices
that each multiply rows of their own, and of what a model makes of such a stack first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.graph import op_nodes, tensor_operands
from autopar.ir.rules.moe import expert_factors


def find_expert_factors(analysis: Analysis, nodes: Collection[fx.Node]) -> Mapping[fx.Node, frozenset[str]]:
    """The expert factors of representative ops; those without any are absent."""
    derived = analysis.derived
    stacks = analysis.captured.parameters.keys() | {node.name for node in derived}
    found = {node: expert_factors(node, analysis.rule(node), stacks) for node in nodes}
    # A stack that is made of a parameter, as by a transposition, has its experts where its users have them.
    for node in reversed(list(derived)):
        (result, *_) = analysis.rule(node).results
        for user, position in derived[node]:
            dims = zip(result, analysis.rule(user).operands[position], strict=True)
            own = {factor for made, used in dims if found.get(user, frozenset()).intersection(used) for factor in made}
            found[node] = found.get(node, frozenset()) | own
    return {node: factors for node, factors in found.items() if factors}


def find_stacks_of_experts(analysis: Analysis) -> frozenset[str]:
    """Placeholder names of the parameters that have a dimension of experts."""
    ops = list(op_nodes(analysis.captured.graph))
    factors = find_expert_factors(analysis, dict.fromkeys(map(analysis.representative, ops)))
    found = set()
    for node in ops:
        own = factors.get(analysis.representative(node), frozenset())
        operands = zip(tensor_operands(node), analysis.rule(node).operands, strict=True) if own else ()
        found |= {operand.name for operand, dims in operands if any(own.intersection(dim) for dim in dims)}
    return frozenset(found & analysis.captured.parameters.keys())


def factors_of_matrices(analysis: Analysis, node: fx.Node) -> frozenset[str]:
    """Factors of the parameters with two dimensions or more that an op reads."""
    rule, parameters = analysis.rule(node), analysis.captured.parameters
    return frozenset(
        factor
        for operand, dims in zip(tensor_operands(node), rule.operands, strict=True)
        if operand.name in parameters and len(operand.meta["val"].shape) > 1
        for dim in dims
        for factor in dim
    )
