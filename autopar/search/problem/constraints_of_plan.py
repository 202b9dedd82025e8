"""Constraints for a search around a plan: some of its choices are pinned, the others searched anew."""

from __future__ import annotations

from math import prod

from autopar.ir.errors import InvalidInput
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.plan import Plan
from autopar.search.problem.constraints import Constraints, role_of_axis
from autopar.search.problem.forbidden_placements import Forbidden


def constraints_like(plan: Plan) -> Constraints:
    """Mesh, pipeline, schedule, microbatches and ZeRO of a plan; its ops, stages and rematerialisation are open."""
    axes = tuple(MeshAxis(name, plan.mesh[axis]) for axis, name in _names(plan).items())
    pipeline = plan.num_stages > 1
    return Constraints(
        pp=plan.num_pipeline_ranks,
        axes=axes,
        zero=plan.zero,
        shard=None if plan.shard_axes is None else prod(plan.mesh[axis] for axis in plan.shard_axes),
        schedule=plan.schedule if pipeline else None,
        virtual_stages=plan.virtual_stages if pipeline else None,
        num_microbatches=plan.batch.num_microbatches,
        precision=plan.precision,
        recipes=tuple(dict.fromkeys(own for block in plan.blocks for own in block.recipes.values())) or (None,),
        expert_capacity=plan.expert_capacity,
    )


def _names(plan: Plan) -> dict[str, str]:
    """What a search has to call the axes of a plan: as they are called where that says what they do.

    An axis that is called otherwise, or after tensors or sequences while it divides the batch too, has several roles.
    """
    found = {}
    for number, (axis, size) in enumerate(plan.mesh.items()):
        role = role_of_axis(axis)
        several = axis in plan.inputs and role not in ("dp", "ep")
        if size > 1:
            found[axis] = f"free{number}" if several or not role else axis
    return found


def mesh_like(plan: Plan) -> Mesh:
    """The stage mesh of a plan, its axes called as in ``constraints_like``."""
    names = _names(plan)
    return Mesh(tuple(MeshAxis(names.get(axis, axis), size) for axis, size in plan.mesh.items()))


def forbidden_like(plan: Plan, forbidden: Forbidden) -> Forbidden:
    """Forbidden placements on the axes of a plan, for ``constraints_like``. Raises InvalidInput for another axis."""
    names = _names(plan)
    for axis, _ in forbidden.placement:
        if axis not in names:
            raise InvalidInput(f"{forbidden}: the plan has no mesh axis {axis!r}, but {', '.join(names) or 'none'}")
    return forbidden.renamed(names)


def with_axes_of(found: Plan, plan: Plan) -> Plan:
    """``found``, which is on the mesh of ``plan``, with the names that ``plan`` has for its axes."""
    names = dict(zip(found.mesh, _names(plan), strict=True))
    blocks = [
        block.model_copy(
            update={"ops": {op: {names[axis]: f for axis, f in axes.items()} for op, axes in block.ops.items()}}
        )
        for block in found.blocks
    ]
    update: dict[str, object] = {
        "mesh": {names[axis]: size for axis, size in found.mesh.items()},
        "inputs": [names[axis] for axis in found.inputs],
        "shard_axes": None if found.shard_axes is None else [names[axis] for axis in found.shard_axes],
        "blocks": blocks,
    }
    if found.prediction is not None:
        spent = found.prediction.breakdown_s.items()
        renamed = {f"communication_{old}": f"communication_{new}" for old, new in names.items()}
        update["prediction"] = found.prediction.model_copy(
            update={"breakdown_s": {renamed.get(part, part): seconds for part, seconds in spent}}
        )
    return found.model_copy(update=update)
