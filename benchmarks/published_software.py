"""Seconds a step of a published run with the training software of its year, where that did what nothing does today.

**ZeRO-3 until 2021.** DeepSpeed gathered each parameter by itself, in place: before every gather the host waited for
the device, so nothing ran beside it. Torch gathered into a buffer and copied each rank's piece out of it with a kernel
of its own. Gradients were all-reduced in 16 bits, also in place. Parameters under 100,000 elements were never taken
apart. (github.com/deepspeedai/DeepSpeed: issue 1173 and pull requests 1188 and 1453, of June to October 2021, the last
of which did away with this; defaults of ``zero/stage3.py`` before it.) So a microbatch on N ranks takes:

    gather          all_gather + N launches of a kernel       forward, again if rematerialised, backward
    reduce          all_reduce                                backward

What the collectives and the launches take is the cost model's; there is no constant for this.

**ZeRO-1 in nanotron** keeps gradients in float32 and is no DistributedDataParallel then: it reduces them after the last
backward and gathers parameters after the optimiser, with nothing beside either. Each tensor is cut into a piece for
each data-parallel rank, and the pieces of a rank are put into one buffer, communicated, and copied back one by one. So
a step of P tensors of n elements in all on d ranks takes, once:

    reduce          reduce_scatter 4n + copies of 16n bytes      the pieces into buffers, and those into one
    gather          all_gather 2n + copies of 12n bytes          the same, out again, and each piece to its tensor
    pieces          P d times what the host takes for one        sliced, checked, copied: it launches a kernel for each

(github.com/huggingface/nanotron: ``make_ddp`` in src/nanotron/trainer.py, ``reduce_scatter_coalesced`` and
``all_gather_coalesced`` in distributed.py, ``_all_gather_params`` in optim/zero.py.)

**Zero Bubble's post-validation.** Under its own schedules a rank updates its parameters as soon as it has the sum of
squared gradients of the ranks before it, and begins the next step; whether a value overflowed, or the norm was to be
clipped, is known later and undoes the update. So no rank waits for others at the end of a step, which takes
``Predicted.period_s``. (Qi et al., arXiv:2401.10241, section 4; github.com/sail-sg/zero-bubble-pipeline-parallelism:
``--enable-optimizer-post-validation`` in examples/pretrain_zero_bubble.sh, in 16 bits, and not for 1F1B.)
"""

from __future__ import annotations

from math import prod

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.hardware.device import ITEMSIZE
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Collective
from autopar.search.predict.predict import Predicted
from benchmarks.published_predictions import roomy_cluster
from benchmarks.published_rows import Row

LAST_IN_PLACE = 21
NEVER_APART = 100_000

# Tensors of a layer in nanotron's Llama: of queries, keys and values; of the output; of gate and up; down; two norms.
_TENSORS_OF_LAYER = 6
# Bytes an element that copies into and out of buffers move: two of float32 gradients, three of 16-bit parameters.
_COPIED = 2 * 8 + 3 * 4
# Seconds of the host for a piece that is gathered: 5.2 us to slice, check, flatten and copy one of 3 elements were
# measured on one core without a GPU, for 48 to 170 tensors on 16 to 128 ranks alike; a launch is assumed to take 4 us
# more. Those of gradients, which one call cuts, are left out.
_PIECE_S = 9.2e-6


def step_time_s(row: Row, captured: CapturedModel, plan: Plan, predicted: Predicted, fitted: Fitted = FITTED) -> float:
    """``predicted`` is of ``plan`` with today's software."""
    if validates_later(row):
        return predicted.period_s
    of_its_time = in_place_s if gathers_in_place(row) else in_pieces_s if reduces_in_pieces(row) else None
    if of_its_time is None:
        return predicted.step_time_s
    today = predicted.breakdown_s.get("gradient_sync", 0.0)
    return predicted.step_time_s - today + of_its_time(row, captured, plan, fitted)


def validates_later(row: Row) -> bool:
    """Whether it is a schedule of Zero Bubble's, run by its authors."""
    return row.stack.name == "zero-bubble-2023" and row.schedule.startswith("ZB")


def reduces_in_pieces(row: Row) -> bool:
    """Whether it is nanotron's ZeRO-1 on several ranks."""
    return row.stack.name == "nanotron" and row.zero_stage_or_fsdp == "zero1" and row.number("dp") > 1


def in_pieces_s(row: Row, captured: CapturedModel, plan: Plan, fitted: Fitted = FITTED) -> float:
    """Seconds a step of reducing gradients after the backward and gathering parameters after the optimiser, of stages
    that have equal parts of the model."""
    cluster = roomy_cluster(row, fitted)
    mesh, stages = plan.stage_mesh, row.number("pp", 1)
    axes = tuple(number for number, name in enumerate(mesh.names) if name.startswith("dp"))
    numel = sum(whole_sizes(captured)) / (row.number("tp", 1) * stages)
    tensors = _TENSORS_OF_LAYER * row.number("layers") / stages
    fabric = Fabric(cluster, mesh)
    sent_s = fabric.time(Collective.REDUCE_SCATTER, 4 * numel, axes)
    sent_s += fabric.time(Collective.ALL_GATHER, ITEMSIZE[row.dtype] * numel, axes)
    pieces = tensors * row.number("dp")
    return sent_s + cluster.device.memory_seconds(_COPIED * numel) + pieces * _PIECE_S


def gathers_in_place(row: Row) -> bool:
    """Whether it is ZeRO-3, of a model that is divided in no other way, by a source of 2021 or before."""
    return (
        row.zero_stage_or_fsdp == "zero3"
        and row.origin.year <= LAST_IN_PLACE
        and row.number("dp") == row.number("n_gpus")
    )


def in_place_s(row: Row, captured: CapturedModel, plan: Plan, fitted: Fitted = FITTED) -> float:
    """Seconds a step of gathering each parameter and reducing each gradient by itself."""
    cluster = roomy_cluster(row, fitted)
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
