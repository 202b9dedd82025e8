"""Where each parameter is stored, and how each use reads it.

A parameter is stored the way its first user needs it. Its gradient is summed once a step over the axes on
which the users' gradients are summands, instead of in every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import fx

from autopar.ir.analysis.derived_parameters import Passing
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import CapturedModel, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Replicate, replicated
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step, redistribute
from autopar.ir.rule import Assignment
from autopar.ir.rules import rule_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Layout of a stored parameter, the axes over which its local gradients are summands, and those of ZeRO."""

    layout: Layout
    partial_axes: tuple[int, ...]
    zero_axes: tuple[int, ...] = ()

    def read(self, value: Layout, grad: Layout, mesh: Mesh) -> tuple[float, tuple[Step, ...]]:
        """How a use that needs ``value`` and returns ``grad`` reads the parameter.

        Returns the factor on the gradient and the redistribution. On a partial axis nothing is summed here; a
        gradient that all ranks have whole is divided, so that the later sum counts it once.
        """
        scale = 1.0
        wanted = list(grad)
        for axis in self.partial_axes:
            if value[axis].is_replicate() and grad[axis].is_partial():
                wanted[axis] = Replicate()
            else:
                scale /= mesh.axes[axis].size
        return scale, redistribute(self.layout, value, tuple(wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One op that takes a parameter as operand ``position``."""

    node: fx.Node
    position: int
    value: Layout
    grad: Layout


def find_uses(
    captured: CapturedModel, assignments: Mapping[fx.Node, Assignment], passing: Passing
) -> dict[str, list[Use]]:
    """Parameter placeholder name -> its uses, in execution order. passing: of ``derived.passing_axes``."""
    uses: dict[str, list[Use]] = {name: [] for name in captured.parameters}
    for node in captured.graph.nodes:
        if node not in assignments:
            continue
        for position, operand in enumerate(tensor_operands(node)):
            if operand.op == "placeholder" and operand.name in uses:
                rule = rule_for(node)
                value, grad = rule.operand_layout(position, assignments[node], passing.get(node, ()))
                uses[operand.name].append(Use(node=node, position=position, value=value, grad=grad))
    return uses


def store(
    captured: CapturedModel, uses: Mapping[str, list[Use]], plan: Plan
) -> tuple[dict[str, Storage], tuple[int, ...]]:
    """Storage of every parameter (by placeholder name), and the mesh axes that ZeRO shards over.

    A data axis divides the step inputs, or has every parameter whole; on it at least one gradient is a summand, or
    the plan shards over it. ZeRO works on the parameters that are whole there, and their gradients are made summands,
    as the engine sums all of them; others (experts, on the axis of their own) are left as they are. An axis on which
    some are cut is left out where the plan names others.
    Raises PlanMismatch if the plan shards over another axis.
    """
    mesh = plan.stage_mesh
    asked = () if plan.shard_axes is None else tuple(sorted(mesh.index(name) for name in set(plan.shard_axes)))
    layouts: dict[str, Layout] = {}
    partial: dict[str, set[int]] = {}
    for name in captured.parameters:
        own = uses[name]
        first = own[0].value if own else replicated(mesh)
        layouts[name] = tuple(Replicate() if placement.is_partial() else placement for placement in first)
        partial[name] = {
            axis
            for axis, placement in enumerate(layouts[name])
            if placement.is_replicate()
            and any(use.value[axis].is_replicate() and use.grad[axis] == Partial() for use in own)
        }
    used = [name for name in captured.parameters if uses[name]]
    whole = {axis for axis in range(len(mesh)) if all(layouts[name][axis].is_replicate() for name in used)}
    data_axes = tuple(
        axis
        for axis in range(len(mesh))
        if (axis in whole or mesh.names[axis] in plan.inputs)
        and (axis in asked or any(axis in partial[name] for name in used))
    )
    for axis in asked:
        if axis not in data_axes:
            name = next(name for name in used if not layouts[name][axis].is_replicate())
            raise PlanMismatch(
                f"shard_axes: ZeRO cannot shard over mesh axis {mesh.names[axis]!r}, on which parameter "
                f"{captured.parameters[name].name} is {layouts[name][axis]} already.\n"
                "  expected: axes that divide the step inputs, or on which every parameter is whole; there are "
                f"{[mesh.names[a] for a in data_axes]}"
            )
    zero_axes: dict[str, tuple[int, ...]] = {}
    for name in used if plan.zero else ():
        zero_axes[name] = tuple(
            axis
            for axis in data_axes
            if layouts[name][axis].is_replicate() and (not asked or axis in asked or axis in whole)
        )
        partial[name].update(zero_axes[name])
    storage = {
        name: Storage(
            layout=layouts[name], partial_axes=tuple(sorted(partial[name])), zero_axes=zero_axes.get(name, ())
        )
        for name in captured.parameters
    }
    return storage, (asked or data_axes) if plan.zero else ()


def local_numel(captured: CapturedModel, name: str, storage: Storage, mesh: Mesh) -> int:
    """Elements of a parameter that one rank stores, before ZeRO."""
    shards = prod(axis.size for axis, placement in zip(mesh.axes, storage.layout, strict=True) if placement.is_shard())
    return captured.parameters[name].numel // shards
