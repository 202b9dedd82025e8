"""All communication of a training step of a placed model."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.placed.op_communication import op_communication
from autopar.ir.placed.parameter_communication import parameter_communication
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.records import PIPELINE_AXIS, Record
from autopar.ir.placed.stage_communication import stage_communication


def step_communication(placed: PlacedModel, num_microbatches: int | None = None) -> tuple[Record, ...]:
    """The records of everything that the ranks of a plan send in a training step, but for what they agree on.

    num_microbatches: of a step with another number of microbatches, of the same size, than the plan has.
    """
    pipelining = placed.plan.pipelining
    if num_microbatches is not None:
        pipelining = replace(pipelining, num_microbatches=num_microbatches)
    records = (
        *op_communication(placed, pipelining.num_microbatches),
        *parameter_communication(placed, pipelining),
        *stage_communication(placed, pipelining.num_microbatches),
        *_loss(placed),
    )
    # An axis may have one rank: what ZeRO shards over it is on disk or in host memory.
    size = {**placed.plan.mesh, PIPELINE_AXIS: placed.plan.num_pipeline_ranks}
    return tuple(record for record in records if any(size[axis] > 1 for axis in record.axes))


def _loss(placed: PlacedModel) -> tuple[Record, ...]:
    """The sum of the loss: over the ranks that have summands of it, under a pipeline over all ranks, in float32."""
    loss, plan = placed.captured.loss_node(), placed.plan
    if loss is None:
        return ()
    axes = tuple(
        axis.name
        for axis, p in zip(placed.mesh.axes, placed.layout(loss), strict=True)
        if p.is_partial() and axis.size > 1
    )
    itemsize = loss.meta["val"].dtype.itemsize
    if plan.num_stages > 1:
        axes, itemsize = (PIPELINE_AXIS, *placed.mesh.names), 4
    if not axes:
        return ()
    return (
        Record(
            cause="loss",
            of=loss.name,
            kind="all_reduce",
            phase="forward",
            axes=axes,
            payload_bytes=float(itemsize),
            times=1,
            stages=tuple(range(plan.num_stages)),
        ),
    )
