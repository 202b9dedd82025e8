"""Units of ZeRO: parameters of one stage that are gathered together, and whose gradients are scattered together.

The parameters that one block alone reads are a unit, and those of a stage that several of its blocks read are the last
one. Left whole are scalars, parameters that two stages of one rank read (FSDP cannot have one in both), and those on
whose data axes there is one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.gradient_flow import computed
from autopar.ir.graph import Parameter, op_nodes, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.storage import zero_divides
from autopar.ir.placement import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroUnit:
    """One unit of a stage.

    block: name of the block whose parameters they are; None for those that several blocks of the stage read.
    zero_stage: 0 to 3. reshards: after each forward of the unit.
    parameters: by placeholder name; none where no parameter is shared.
    has_backward: a gradient comes to what the unit computes.
    narrow: placeholder names of those that are gathered in 8 bits, by the largest magnitude of each, on which ranks
    agree once a step.
    on_disk: what a rank has of them is in files on a local disk.
    """

    stage: int
    block: str | None
    zero_stage: int
    reshards: bool
    parameters: Mapping[str, Parameter]
    has_backward: bool = True
    narrow: frozenset[str] = frozenset()
    on_disk: bool = False


def axes_of_maxima(
    parameters: Iterable[tuple[Layout, Sequence[int]]], shard_axes: Sequence[int], mesh: Mesh
) -> tuple[int, ...]:
    """Mesh axes over which ranks agree on the largest magnitudes of parameters: those that cut any of them.

    parameters: layout and axes that ZeRO works over, of each. shard_axes: those that it shards over.
    """
    cut = {
        axis
        for layout, zero_axes in parameters
        for axis, placement in enumerate(layout)
        if not placement.is_replicate() or (axis in zero_axes and axis in shard_axes)
    }
    return tuple(axis for axis in sorted(cut) if mesh.sizes[axis] > 1)


def parameter_readers(placed: PlacedModel) -> Mapping[str, frozenset[int]]:
    """Placeholder name of every parameter that a training step reads -> numbers of the blocks that read it."""
    readers: dict[str, set[int]] = {}
    runs = computed(placed.captured)
    for user in op_nodes(placed.captured.graph):
        for operand in tensor_operands(user) if user in runs else ():
            if placed.is_parameter(operand):
                readers.setdefault(operand.name, set()).add(placed.analysis.block_of(user))
    return {name: frozenset(blocks) for name, blocks in readers.items()}


def stages_that_read(placed: PlacedModel, blocks: frozenset[int]) -> tuple[int, ...]:
    """The stages of ``blocks``, in order."""
    return tuple(sorted({_stage_of(placed, block) for block in blocks}))


def zero_units(placed: PlacedModel) -> tuple[ZeroUnit, ...]:
    """The units of every stage that has any, in order of blocks, that of shared parameters last."""
    found: dict[int, dict[int, dict[str, Parameter]]] = {}
    for name, blocks in parameter_readers(placed).items():
        for stage in _dividing_stages(placed, name, blocks):
            unit = found.setdefault(stage, {}).setdefault(_block_alone(placed, blocks, stage), {})
            unit[name] = placed.captured.parameters[name]
    # Blocks that a gradient comes back to, and what stages themselves hold.
    flowing = {PRELUDE, *map(placed.analysis.block_of, placed.analysis.flow)}
    plan, repetition = placed.plan, placed.analysis.repetition
    units = []
    for stage in sorted(found):
        last = max(found[stage])
        for number in (*sorted(found[stage].keys() - {PRELUDE}), PRELUDE):
            block = None if number == PRELUDE else repetition.blocks[number]
            parameters = found[stage].get(number, {})
            # From host memory a piece comes as it is stored.
            own, offload = plan.stages[stage], plan.stages[stage].offload
            units.append(
                ZeroUnit(
                    stage=stage,
                    block=None if block is None else block.name,
                    zero_stage=plan.zero if block is None else plan.zero_of(block.kind),
                    # Backward begins with the last block, and what the stage itself holds is used until then.
                    reshards=block is not None and number != last and plan.reshards(block.kind),
                    parameters=parameters,
                    has_backward=number in flowing,
                    narrow=frozenset() if offload else placed.analysis.narrow_weights & parameters.keys(),
                    on_disk=block is not None and own.is_on_disk(number - own.first),
                )
            )
    return tuple(units)


def _stage_of(placed: PlacedModel, block: int) -> int:
    return 0 if block == PRELUDE else placed.plan.stage_of(block)


def _block_alone(placed: PlacedModel, blocks: frozenset[int], stage: int) -> int:
    """The block that alone reads a parameter in a stage; PRELUDE where several do."""
    own = [block for block in blocks if _stage_of(placed, block) == stage]
    return own[0] if len(own) == 1 else PRELUDE


def _dividing_stages(placed: PlacedModel, name: str, blocks: frozenset[int]) -> tuple[int, ...]:
    """The stages in which ZeRO divides a parameter: all that read it, or none."""
    plan, mesh, parameter = placed.plan, placed.mesh, placed.captured.parameters[name]
    stages = stages_that_read(placed, blocks)
    if len(set(map(plan.pipelining.rank_of, stages))) < len(stages):
        return ()
    axes = [axis for axis in placed.storage[name].zero_axes if axis in placed.shard_axes]
    # Over one rank there is nothing to shard, but what is offloaded is in host memory all the same.
    offloaded = all(plan.stages[stage].offload for stage in stages)
    if not axes or (prod(mesh.sizes[axis] for axis in axes) == 1 and not offloaded):
        return ()
    block = _block_alone(placed, blocks, stages[0])
    # Copies on several stages have to be cut alike.
    shared = len(stages) > 1 or block == PRELUDE
    zero_stage = plan.zero if shared else plan.zero_of(placed.analysis.repetition.blocks[block].kind)
    divides = zero_divides(zero_stage, requires_grad=parameter.requires_grad, shape=parameter.shape)
    return stages if divides else ()
