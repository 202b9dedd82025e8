"""The collectives of a plan, one by one: tensor, mesh axis, bytes and seconds.

Those between ops are steps of redistributions (``ir.redistribution``); those inside an op belong to its lowering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_model.communication.redistribution_table import WHOLE, redistribution
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.ir.placed.layouts import Need
from autopar.ir.placement import Layout
from autopar.ir.redistribution import Collective, Step, redistribute
from autopar.ir.rule import Assignment
from autopar.search.pricing.block_moves import layouts_of, needs_of
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.arrivals import Transfer
from autopar.search.problem.workload import Workload

_GROWING, _SHRINKING = (Collective.ALL_GATHER,), (Collective.SPLIT, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One step of a redistribution, or the collectives inside one op.

    tensor: the tensor that moves, by the op or step input that makes it. users: ops that need it in that layout. axis:
    of the mesh. forward, backward: collectives, "" for none. num_bytes: of a microbatch on one rank, where it is
    largest; None inside an op. time: of a microbatch. repeats: blocks that have it. source, readers: representative ops
    behind the names.
    """

    tensor: str
    users: tuple[str, ...]
    axis: str
    forward: str
    backward: str
    num_bytes: float | None
    time: OpTime
    repeats: int
    source: fx.Node = field(repr=False)
    readers: tuple[fx.Node, ...] = field(repr=False)


def name_of(workload: Workload, node: fx.Node) -> str:
    """``BLOCK/OP`` as in the plan; the name of a step input."""
    block = workload.repetition.block_of.get(node)
    if block is None:
        return node.name
    repetition = workload.repetition
    return f"{repetition.kinds[repetition.blocks[block].kind].name}/{repetition.key.get(node, node.name)}"


def communications(pricing: Pricing, assignment: tuple[Assignment, ...]) -> Iterator[Communication]:
    """Every one of a plan, repeats of a block once."""
    workload = pricing.workload
    layouts = layouts_of(workload, assignment)
    for transfer in workload.transfers:
        source = layouts.made(transfer.tensor.node, transfer.tensor.result)
        steps = of_transfer(pricing, transfer, source, needs_of(layouts, transfer))
        yield from (step for step in steps if step.forward or step.backward)
    for node, choices in layouts.assignments.items():
        yield from inside_op(pricing, node, choices)


def of_transfer(
    pricing: Pricing, transfer: Transfer, source: Layout, needs: Mapping[Need, Sequence[fx.Node]]
) -> Iterator[Communication]:
    """Every step that brings a tensor from the layout ``source`` to its users, those on one rank alone too.

    needs: ``needs_of`` the transfer.
    """
    workload, tensor = pricing.workload, transfer.tensor
    for (value, grad), users in needs.items():
        for step, num_bytes, time in priced_steps(pricing, transfer, source, value, grad):
            forward, backward = step.forward, step.backward if tensor.differentiable else Collective.NONE
            yield Communication(
                tensor=name_of(workload, tensor.node),
                users=tuple(dict.fromkeys(name_of(workload, node) for node in users)),
                axis=pricing.mesh.names[step.axis],
                forward=forward.value if forward.communicates else "",
                backward=backward.value if backward.communicates else "",
                num_bytes=num_bytes,
                time=time,
                repeats=len(transfer.blocks),
                source=tensor.node,
                readers=tuple(users),
            )


def inside_op(pricing: Pricing, node: fx.Node, choices: Assignment) -> Iterator[Communication]:
    """Communications of the lowering of an op, together."""
    workload, own = pricing.workload, pricing.lowering(node, choices)
    if own.total_s:
        lowered = workload.rule(node).lowered
        axes = [name for name, choice in zip(pricing.mesh.names, choices, strict=True) if choice in lowered]
        name = name_of(workload, node)
        yield Communication(
            tensor=name,
            users=(name,),
            axis=", ".join(axes),
            forward="inside the op",
            backward="inside the op",
            num_bytes=None,
            time=own,
            repeats=workload.repeats[node],
            source=node,
            readers=(node,),
        )


def priced_steps(
    pricing: Pricing, transfer: Transfer, source: Layout, value: Layout, grad: Layout
) -> Iterator[tuple[Step, float, OpTime]]:
    """Steps of a redistribution, with the bytes of a microbatch that a rank has where it has most, as they are before
    any gather in 8 bits, and the seconds."""
    tensor, shares = transfer.tensor, pricing.shares(transfer)
    num_bytes = tensor.bytes_of_microbatch(pricing.parts)
    rows, before = tensor.rows_of_microbatch(pricing.parts), ZERO
    local = num_bytes / pricing.pieces(source)
    steps = redistribute(source, value, grad)
    shares = shares if len(steps) == 1 else WHOLE
    for number, step in enumerate(steps):
        size = pricing.mesh.sizes[step.axis]
        after = local * size if step.forward in _GROWING else local / size if step.forward in _SHRINKING else local
        until = redistribution(pricing.moves.links, steps[: number + 1], source, rows, shares).at(num_bytes)
        time = until + -1.0 * before
        yield step, max(local, after), OpTime(time.forward_s, time.backward_s if tensor.differentiable else 0.0)
        local, before = after, until
