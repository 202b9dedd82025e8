"""The collectives of a plan, one by one: what moves, along which axis, how much and how long.

Those between ops are steps of redistributions (``ir.redistribution``); those inside an op belong to its lowering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.redistributions import redistribution
from autopar.cost_model.seconds import OpTime
from autopar.ir.placement import Layout
from autopar.ir.redistribution import Collective, redistribute
from autopar.ir.rule import Assignment
from autopar.search.evaluate import layout_of, needs_of, spread
from autopar.search.pricing import Pricing
from autopar.search.workload import Tensor, Workload

_GROWING, _SHRINKING = (Collective.ALL_GATHER,), (Collective.SPLIT, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One step of a redistribution, or the collectives inside one op.

    tensor: what moves, by the op or step input that makes it. users: ops that need it so. axis: of the mesh. forward,
    backward: collectives, "" for none. num_bytes: of a microbatch on one rank, where it is largest; None inside an op.
    time: of a microbatch.
    """

    tensor: str
    users: tuple[str, ...]
    axis: str
    forward: str
    backward: str
    num_bytes: float | None
    time: OpTime


def name_of(load: Workload, node: fx.Node) -> str:
    """``BLOCK/OP`` as in the plan; the name of a step input."""
    block = load.folding.block_of.get(node)
    if block is None:
        return node.name
    return f"{load.folding.kinds[load.folding.blocks[block].kind].name}/{load.folding.key.get(node, node.name)}"


def communications(pricing: Pricing, leaders: tuple[Assignment, ...]) -> Iterator[tuple[set[fx.Node], Communication]]:
    """Every one of a plan, repeats of a block once, with the representative ops that it is between."""
    load = pricing.workload
    assignments, inputs = spread(load, leaders), leaders[load.clusters.inputs.index]
    passing = load.passing(assignments)
    for transfer in load.transfers:
        source = layout_of(pricing, transfer.tensor, assignments, inputs)
        for value, grad in needs_of(load, transfer, assignments, passing):
            users = [
                node
                for node, position in transfer.uses
                if load.rule(node).operand_layout(position, assignments[node], passing.get(node, ()))[0] == value
            ]
            around = {transfer.tensor.node, *users}
            names = tuple(dict.fromkeys(name_of(load, node) for node in users))
            for step in _steps(pricing, transfer.tensor, source, value, grad, names):
                yield around, step
    for node, assignment in assignments.items():
        own = pricing.lowering(node, assignment)
        if own.total_s:
            lowered = load.rule(node).lowered
            axes = [name for name, choice in zip(pricing.mesh.names, assignment, strict=True) if choice in lowered]
            name = name_of(load, node)
            yield {node}, Communication(
                tensor=name, users=(name,), axis=", ".join(axes), forward="inside the op", backward="inside the op",
                num_bytes=None,
                time=own,
            )  # fmt: skip


def _steps(
    pricing: Pricing, tensor: Tensor, source: Layout, value: Layout, grad: Layout, users: tuple[str, ...]
) -> Iterator[Communication]:
    num_bytes = tensor.bytes_of_microbatch(pricing.num_microbatches)
    rows, before = tensor.rows_of_microbatch(pricing.num_microbatches), OpTime(0.0, 0.0)
    local = num_bytes / pricing.pieces(source)
    steps = redistribute(source, value, grad)
    for number, step in enumerate(steps):
        size = pricing.mesh.sizes[step.axis]
        after = local * size if step.forward in _GROWING else local / size if step.forward in _SHRINKING else local
        until = redistribution(pricing.moves.links, steps[: number + 1], source, rows).at(num_bytes)
        time = until + -1.0 * before
        made = step.forward, step.backward if tensor.differentiable else Collective.NONE
        if any(kind.communicates for kind in made):
            yield Communication(
                tensor=name_of(pricing.workload, tensor.node),
                users=users,
                axis=pricing.mesh.names[step.axis],
                forward=made[0].value if made[0].communicates else "",
                backward=made[1].value if made[1].communicates else "",
                num_bytes=max(local, after),
                time=OpTime(time.forward_s, time.backward_s if tensor.differentiable else 0.0),
            )
        local, before = after, until
