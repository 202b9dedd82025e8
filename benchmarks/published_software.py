"""Seconds a step of a published run with the training software of its year, where that did what nothing does today.

**ZeRO-3 until 2021.** DeepSpeed gathered each parameter by itself, in place: before every gather the host waited for
the device, so nothing ran beside it. Torch gathered into a buffer and copied each rank's piece out of it with a kernel
of its own. Gradients were all-reduced in 16 bits, also in place. Parameters under 100,000 elements were never taken
apart. (github.com/deepspeedai/DeepSpeed: issue 1173 and pull requests 1188 and 1453, of June to October 2021, the last
of which did away with this; defaults of ``zero/stage3.py`` before it.) So a microbatch on N ranks takes:

    gather          all_gather + N launches of a kernel       forward, again if rematerialised, backward
    reduce          all_reduce                                backward

What the collectives and the launches take is the cost model's; there is no constant for this.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.hardware.device import ITEMSIZE
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Collective
from autopar.search.predict.predict import Predicted

if TYPE_CHECKING:
    from published_rows import Row

LAST_IN_PLACE = 21
NEVER_APART = 100_000


def step_time_s(row: Row, captured: CapturedModel, plan: Plan, predicted: Predicted, fitted: Fitted = FITTED) -> float:
    """``predicted`` is of ``plan`` with today's software."""
    if not gathers_in_place(row):
        return predicted.step_time_s
    today = predicted.breakdown_s.get("gradient_sync", 0.0)
    return predicted.step_time_s - today + in_place_s(row, captured, plan, fitted)


def gathers_in_place(row: Row) -> bool:
    """Whether it is ZeRO-3, of a model that is divided in no other way, by a source of 2021 or before."""
    return row.zero_stage_or_fsdp == "zero3" and row.year <= LAST_IN_PLACE and row.number("dp") == row.number("n_gpus")


def in_place_s(row: Row, captured: CapturedModel, plan: Plan, fitted: Fitted = FITTED) -> float:
    """Seconds a step of gathering each parameter and reducing each gradient by itself."""
    cluster = row.cluster(fitted)
    fabric, axes = Fabric(cluster, plan.stage_mesh), tuple(range(len(plan.stage_mesh)))
    passes = 3 if row.recompute == "full" else 2
    copies_s = plan.stage_mesh.size * cluster.device.kernel_launch_s
    seconds = 0.0
    for numel in whole_sizes(captured):
        if numel < NEVER_APART:
            continue
        num_bytes = ITEMSIZE[row.dtype] * numel
        gather_s = fabric.time(Collective.ALL_GATHER, num_bytes, axes) + copies_s
        seconds += passes * gather_s + fabric.time(Collective.ALL_REDUCE, num_bytes, axes)
    return plan.batch.num_microbatches * seconds


def whole_sizes(captured: CapturedModel) -> list[int]:
    """Elements of each parameter as the model has it, those that capture takes apart put together."""
    sizes = {}
    for parameter in captured.parameters.values():
        whole = parameter.part.shape if parameter.part else parameter.shape
        sizes[parameter.whole_names] = prod(whole)
    return list(sizes.values())
