"""How each parameter is stored, and how each use reads it.

A parameter is stored the way its first user needs it. Its gradient is summed once a step over the axes on which the
users' gradients are summands, instead of in every microbatch. ZeRO shards it over data axes on which it is whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import Parameter
from autopar.ir.mesh import Mesh
from autopar.ir.placed.layouts import Need
from autopar.ir.placement import Layout, Partial, Replicate
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step, redistribute

# Largest piece of a dimension that ZeRO cuts unevenly, as a multiple of an even share, up to which it does. Chosen: a
# vocabulary may have any size, and other dimensions take one more copy in every gather.
UNEVEN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """layout: of the stored parameter. partial_axes: over which ranks' gradients are summands, summed once a step.

    zero_axes: those that ZeRO works over, none without it.
    """

    layout: Layout
    partial_axes: tuple[int, ...]
    zero_axes: tuple[int, ...] = ()

    def wanted_gradient(self, need: Need) -> Layout:
        """Layout in which a use leaves its gradient: summands stay on the axes that are summed once a step."""
        return tuple(
            Replicate() if axis in self.partial_axes and value.is_replicate() and grad.is_partial() else grad
            for axis, (value, grad) in enumerate(zip(need.value, need.grad, strict=True))
        )

    def scale(self, need: Need, mesh: Mesh) -> float:
        """Factor on the gradient of a use: one that all ranks have whole is divided, so that the sum counts it once."""
        scale = 1.0
        for axis in self.partial_axes:
            if not (need.value[axis].is_replicate() and need.grad[axis].is_partial()):
                scale /= mesh.axes[axis].size
        return scale

    def steps(self, need: Need) -> tuple[Step, ...]:
        """Redistribution from the stored layout to that of a use, once a microbatch."""
        return redistribute(self.layout, need.value, self.wanted_gradient(need))


def stored(needs: Sequence[Need], num_axes: int, *, trains: bool) -> Storage:
    """Storage of a parameter with these uses, in execution order, before ZeRO. Whole where no op reads it.

    trains: whether it has a gradient, which may have to be summed.
    """
    first = needs[0].value if needs else (Replicate(),) * num_axes
    layout = tuple(Replicate() if placement.is_partial() else placement for placement in first)
    partial = (
        axis
        for axis, placement in enumerate(layout)
        if trains
        and placement.is_replicate()
        and any(need.value[axis].is_replicate() and need.grad[axis] == Partial() for need in needs)
    )
    return Storage(layout=layout, partial_axes=tuple(partial))


def find_data_axes(parameters: Iterable[Storage], inputs: Sequence[object]) -> tuple[int, ...]:
    """Data axes: they divide the step inputs, or have every parameter whole; and on them some gradient is a summand.

    parameters: those that ops read, before ZeRO. inputs: choices of the step inputs, None where an axis does not divide
    them.
    """
    every = list(parameters)
    summed = {axis for own in every for axis in own.partial_axes}
    return tuple(axis for axis in sorted(summed) if inputs[axis] is not None or axis in whole_axes(every, len(inputs)))


def whole_axes(parameters: Iterable[Storage], num_axes: int) -> frozenset[int]:
    """Axes on which every one of ``parameters`` is whole."""
    every = list(parameters)
    return frozenset(axis for axis in range(num_axes) if all(own.layout[axis].is_replicate() for own in every))


def store(
    parameters: Mapping[str, Sequence[Need]],
    plan: Plan,
    inputs: Sequence[object],
    described: Mapping[str, Parameter],
    experts: Container[str] = (),
) -> tuple[dict[str, Storage], tuple[int, ...]]:
    """Storage of every parameter under ``plan``, and the mesh axes that ZeRO shards over.

    parameters: needs of the uses of each, in execution order. described: each by the same placeholder name. experts:
    names of those that are stacks of experts.
    ZeRO works on the parameters that are whole on a data axis, and their gradients are made summands there, as the
    engine sums all of them; others (experts, on the axis of their own) are left as they are. An axis on which some are
    cut is left out where the plan names others.
    A plan may name data axes, whether gradients are summed there or not, and axes on which all parameters but experts
    are whole. Raises PlanMismatch if it names another.
    """
    mesh = plan.stage_mesh
    asked = () if plan.shard_axes is None else tuple(sorted(mesh.index(name) for name in set(plan.shard_axes)))
    storage = {
        name: stored(needs, len(mesh), trains=described[name].requires_grad) for name, needs in parameters.items()
    }
    read = {name: own for name, own in storage.items() if parameters[name]}
    data_axes, whole = find_data_axes(read.values(), inputs), whole_axes(read.values(), len(mesh))
    dense = {name: own for name, own in read.items() if name not in experts}
    dividing = {axis for axis, choice in enumerate(inputs) if choice is not None}
    able = sorted(dividing | whole_axes(dense.values(), len(mesh)))
    for axis in asked:
        if axis not in able:
            name = next(name for name, own in dense.items() if not own.layout[axis].is_replicate())
            raise PlanMismatch(
                f"shard_axes: ZeRO cannot shard over mesh axis {mesh.names[axis]!r}, on which parameter "
                f"{described[name].name} is {read[name].layout[axis]} already.\n"
                "  expected: axes that divide the step inputs, or on which every parameter but experts is whole; there "
                f"are {[mesh.names[a] for a in able]}"
            )
    data_axes = tuple(sorted({*data_axes, *asked}))
    for name, own in read.items() if plan.zero else ():
        axes = tuple(
            axis
            for axis in data_axes
            if own.layout[axis].is_replicate() and (not asked or axis in asked or axis in whole)
        )
        storage[name] = replace(own, partial_axes=tuple(sorted({*own.partial_axes, *axes})), zero_axes=axes)
    return storage, (asked or data_axes) if plan.zero else ()


def zero_divides(zero_stage: int, *, requires_grad: bool, shape: Sequence[int]) -> bool:
    """Whether ZeRO divides a parameter of a unit at ``zero_stage`` (0 to 3).

    A scalar cannot be cut. A frozen parameter has neither a gradient nor moments for stages 1 and 2 to divide.
    """
    return bool(shape) and zero_stage >= (1 if requires_grad else 3)


def zero_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dimension along which ZeRO cuts a parameter of a local ``shape`` into ``num_ranks`` pieces.

    The first one, unless its largest piece would be far beyond an even share, as of two experts on eight ranks, and
    another one divides. FSDP cuts others than the first evenly or not at all.
    """
    if not shape or -(-shape[0] // num_ranks) * num_ranks <= UNEVEN * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % num_ranks == 0), 0)
