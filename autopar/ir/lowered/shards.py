"""Helpers of every lowering: the place of a rank among the shards, and the axes and arguments of its call."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.primitives.group_communication import group_rank, group_size
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.rules.call import REQUIRED, parameters

Groups = tuple[str, ...]


def shard_count(groups: Groups) -> int:
    """Number of shards that ``groups`` cut a dimension into."""
    count = 1
    for group in groups:  # a generator would break the graph that torch.compile traces
        count *= group_size(group)
    return count


def shard_index(groups: Groups) -> int:
    """Number of this rank's shard; the first group is the major one."""
    index = 0
    for group in groups:
        index = index * group_size(group) + group_rank(group)
    return index


def axes_with(factors: frozenset[str] | set[str], assignment: Assignment, mesh: Mesh) -> Groups:
    """Mesh axes, major first, that shard one of ``factors``."""
    return tuple(
        axis.name
        for axis, choice in zip(mesh.axes, assignment, strict=True)
        if choice in factors or not factors.isdisjoint(factors_of_choice(choice))
    )


def axes_lowered(name: str, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> Groups:
    """Mesh axes, major first, that shard a factor with the lowering ``name``."""
    return axes_with({factor for factor, lowering in rule.lowered.items() if lowering == name}, assignment, mesh)


def axes_sharded(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> Groups:
    """Mesh axes that shard any factor, so that ranks along them hold different parts."""
    return axes_with(set(rule.sizes), assignment, mesh)


def factors_of(tensor: TensorFactors) -> frozenset[str]:
    """All factors of a tensor."""
    return frozenset(factor for dim in tensor for factor in dim)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in."""
    bound: dict[str, Any] = {}
    for number, (name, default) in enumerate(parameters(node.target)):
        if number < len(node.args):
            bound[name] = node.args[number]
        elif name in node.kwargs:
            bound[name] = node.kwargs[name]
        else:
            assert default is not REQUIRED, f"{node}: no argument {name!r}"
            bound[name] = default
    return bound
