"""Stored parameters: what a program reads of them, and that each gradient is summed exactly once.

The runtime adds up the gradients of a parameter over the microbatches, over ``ParameterLayout.partial_axes`` and over
``ParameterLayout.stages``. So what a use of it hands back has to be a summand there, and nowhere else; a gradient that
every rank has whole is one once it is divided by their number (``grad_scale``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod

import torch
from torch import fx

from autopar.ir.graph import CapturedModel
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Replicate, divides
from autopar.ir.program import ParameterLayout, StageProgram
from autopar.passes.verify.terms import Term
from autopar.passes.verify.types import TIME, WHOLE, Mistyped, Summands, Type
from autopar.passes.verify.values import Derivation, Value


@dataclass(frozen=True, slots=True)
class Read:
    """The backward of ``read_parameter``: the gradient is multiplied by ``scale`` and joins what the runtime sums."""

    layout: ParameterLayout
    scale: float

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        """Raises Mistyped unless the gradient is counted once."""
        name, sizes = self.layout.parameter.name, mesh.sizes
        summed = {1 + axis for axis in self.layout.partial_axes if sizes[1 + axis] > 1}
        if sizes[TIME] > 1 and TIME not in summands:
            raise Mistyped(
                f"the gradient of parameter {name} is whole in each of {sizes[TIME]} microbatches, which are added up; "
                "expected a summand of each"
            )
        for axis in sorted(summands - {TIME} - summed):
            raise Mistyped(
                f"the gradient of parameter {name} is a summand (Partial()) on {mesh.names[axis]}, where nobody sums "
                f"it: it is summed over {[mesh.names[a] for a in sorted(summed)]}"
            )
        expected = 1.0 / prod(sizes[axis] for axis in summed - summands)
        if not isclose(expected, self.scale, rel_tol=1e-9):
            whole = [mesh.names[axis] for axis in sorted(summed - summands)]
            raise Mistyped(
                f"the gradient of parameter {name} is whole on {whole or 'no axis'} of those over which it is summed; "
                f"expected grad_scale={expected}, got {self.scale}"
            )
        return (WHOLE,)


def read(node: fx.Node, value: Value, layout: ParameterLayout, compute: torch.dtype | None) -> Derivation:
    """The type of a call of ``read_parameter``. Raises Mistyped."""
    options = dict(node.kwargs)
    dtype, scale = options.pop("dtype", None), options.pop("grad_scale", 1.0)
    if options or len(node.args) != 1 or dtype not in (None, compute) or not isinstance(scale, float):
        raise Mistyped(f"expected the dtype of compute ({compute}) and a number as options, got {node.kwargs}")
    (given,) = value.types
    return Derivation(operands=(given,), results=(given,), way=Read(layout, scale))


def stored(layout: ParameterLayout, term: Term, mesh: Mesh) -> Value:
    """A parameter as a stage holds it. mesh: with the microbatch in front."""
    return Value((Type(term, (Replicate(), *layout.layout)),), layout.parameter.requires_grad)


def check_layouts(captured: CapturedModel, programs: Sequence[StageProgram]) -> Mapping[str, str]:
    """Parameter -> name of its captured placeholder. Raises Mistyped if stages do not hold parameters alike."""
    placeholders = {parameter.name: name for name, parameter in captured.parameters.items()}
    holders: dict[str, list[int]] = {}
    first: dict[str, ParameterLayout] = {}
    for program in programs:
        for name, layout in program.held.items():
            holders.setdefault(name, []).append(program.stage)
            if name not in placeholders or layout.parameter != captured.parameters[placeholders[name]]:
                raise Mistyped(f"stage {program.stage} holds {name}, which is not that parameter of the model")
            if first.setdefault(name, layout) != layout:
                raise Mistyped(f"stages {holders[name]} store parameter {name} in different ways")
            _check_layout(name, layout, program.mesh)
        _check_units(program)
    for name, stages in holders.items():
        if tuple(stages) != first[name].stages:
            raise Mistyped(
                f"parameter {name} is held by stages {stages}; its gradients are summed over {list(first[name].stages)}"
            )
    return placeholders


def _check_layout(name: str, layout: ParameterLayout, mesh: Mesh) -> None:
    cut = [axis for axis, placement in enumerate(layout.layout) if placement.is_shard()]
    if len(layout.layout) != len(mesh) or any(placement.is_partial() for placement in layout.layout):
        raise Mistyped(f"parameter {name} is stored as {layout.layout} on {mesh}")
    if not divides(layout.parameter.shape, layout.layout, mesh):
        raise Mistyped(f"parameter {name} of shape {layout.parameter.shape} has no equal pieces as {layout.layout}")
    for axis in layout.partial_axes:
        if axis in cut:
            raise Mistyped(f"the gradient of {name} is summed over {mesh.names[axis]}, where ranks hold other pieces")
    if not set(layout.zero_axes) <= set(layout.partial_axes):
        raise Mistyped(f"ZeRO shards {name} over axes {layout.zero_axes}, its gradient is summed over others")


def _check_units(program: StageProgram) -> None:
    """Raise Mistyped unless ZeRO's units divide what their own blocks hold, each parameter once."""
    held: dict[str | None, tuple[str, ...]] = {None: program.shared_parameters}
    held |= {block.name: block.parameters for block in program.blocks}
    units: dict[str, str | None] = {}
    for unit in program.zero_units:
        for parameter in unit.parameters.values():
            if parameter.name in units or parameter.name not in held.get(unit.block, ()):
                raise Mistyped(
                    f"ZeRO gathers {parameter.name} with {unit.block or 'the shared parameters'} of stage "
                    f"{program.stage}, which is not what alone reads it"
                )
            units[parameter.name] = unit.block
