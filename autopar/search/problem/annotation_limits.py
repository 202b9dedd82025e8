"""The user's annotations as limits on the choices of ops."""

from __future__ import annotations

import difflib

from torch import fx

from autopar.ir.annotations import FixedLayout, parse_layout
from autopar.ir.errors import InvalidInput
from autopar.ir.graph import op_nodes, tensor_operands
from autopar.ir.ops.composite import annotated
from autopar.ir.placement import Placement, Replicate, Shard
from autopar.ir.rule import Choice
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload


def agrees(workload: Workload, constraints: Constraints, member: fx.Node, choice: Choice, axis: str) -> bool:
    """Whether ``member`` may make ``choice`` on ``axis``: as to its result, if annotated, and its parameters."""
    rule = workload.rule(member)
    if member.target is annotated and not _is(rule.result(0, choice), _layout_of(member), axis, len(rule.results[0])):
        return False
    for annotation in constraints.annotations:
        for position, operand in enumerate(tensor_operands(member)):
            parameter = workload.captured.parameters.get(operand.name) if operand.op == "placeholder" else None
            if parameter is not None and annotation.matches((*parameter.names, *parameter.whole_names)):
                value, _ = rule.operand(position, choice)
                if not _is(value, annotation.layout, axis, len(parameter.shape)):
                    return False
    return True


def check_annotations(workload: Workload, constraints: Constraints) -> None:
    """Raise InvalidInput for an annotation that says nothing, or names an axis or a dimension that is not there."""
    axes = constraints.axes if constraints.axes is not None else constraints.pinned_axes()
    names = [axis.name for axis in axes]
    given: list[tuple[str, FixedLayout]] = [(str(a), a.layout) for a in constraints.annotations]
    given += [
        (f"constrain of {node.name} ({node.meta.get('source', 'no source line')})", _layout_of(node))
        for node in op_nodes(workload.captured.graph)
        if node.target is annotated
    ]
    for what, layout in given:
        for axis, _ in layout:
            if axis not in names:
                raise InvalidInput(
                    f"{what}: there is no mesh axis {axis!r}; the pinned ones are {names or 'none'}.\n"
                    f"  try: pin the degree, as in {axis}=2, or pass a DeviceMesh whose axes have names"
                )
    parameters = list(workload.captured.parameters.values())
    for annotation in constraints.annotations:
        found = [p for p in parameters if annotation.matches((*p.names, *p.whole_names))]
        if not found:
            every = [name for p in parameters for name in p.names]
            close = difflib.get_close_matches(annotation.pattern, every, n=3, cutoff=0.3)
            raise InvalidInput(f"{annotation}: no parameter has such a name.\n  names like it: {', '.join(close)}")
        for parameter in found:
            rank = len(parameter.shape)
            for axis, dim in annotation.layout:
                if dim is not None and not -rank <= dim < rank:
                    raise InvalidInput(
                        f"{annotation}: {parameter.name} has {rank} dimensions, dimension {dim} is not among them "
                        f"(mesh axis {axis!r})"
                    )
    _check_repeats(workload, constraints)


def _check_repeats(workload: Workload, constraints: Constraints) -> None:
    """Repeats of a block share their decisions, so a pattern has to match in all of them or in none."""
    parameters = workload.captured.parameters
    for node, first in workload.repetition.representative.items():
        if node.op != "call_function" or node is first:
            continue
        for one, other in zip(tensor_operands(node), tensor_operands(first), strict=True):
            if one.name not in parameters or other.name not in parameters:
                continue
            for annotation in constraints.annotations:
                if annotation.matches(parameters[one.name].names) != annotation.matches(parameters[other.name].names):
                    raise InvalidInput(
                        f"{annotation}: it matches only one of {parameters[other.name].name} and "
                        f"{parameters[one.name].name}, but the blocks they are in repeat each other and are laid out "
                        "alike.\n  try: a pattern that matches both, with * for the number of the layer"
                    )


def _layout_of(node: fx.Node) -> FixedLayout:
    return parse_layout(str(node.kwargs["placements"]))


def _is(placement: Placement, layout: FixedLayout, axis: str, rank: int) -> bool:
    """Whether ``placement`` on ``axis`` is what the layout fixes there, if it does."""
    for name, dim in layout:
        if name == axis:
            return placement == (Replicate() if dim is None else Shard(dim % rank))
    return True
