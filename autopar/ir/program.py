"""The local program of one pipeline stage, which partitioning hands to the runtime.

All graphs have local shapes and are the same on every rank of the stage; collectives name mesh axes in
their ``group`` keyword, which the runtime replaces by process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.graph import Buffer, Parameter
from autopar.ir.mesh import Mesh
from autopar.ir.placed.zero_units import ZeroUnit
from autopar.ir.placement import Layout, Placement
from autopar.ir.program_sizes import ProgramSizes
from autopar.ir.rematerialisation import Remat


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """How a parameter is stored.

    layout: Shard or Replicate on each axis of the stage mesh.
    partial_axes: mesh axes over which the ranks' gradients are summands, to be summed once a step.
    stages: every pipeline stage that holds a copy (tied weights: several; their gradients are summed).
    zero_axes: data axes on which it is whole, so that ZeRO may work there; none without ZeRO.
    """

    parameter: Parameter
    layout: Layout
    partial_axes: tuple[int, ...]
    stages: tuple[int, ...]
    zero_axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """One block instance: a graph from stage values to stage values.

    graph: placeholders are, in order, ``inputs``; its output is the flat tuple ``outputs``. The parameters
        and buffers that only this block uses are ``get_attr`` nodes whose target is the original dotted name.
    kind: number of the distinct block; blocks of one kind have the same code.
    remat: what is kept for backward. Where it is listed, ``meta["recomputation"]`` of an op of the graph says what
        becomes of it in recomputation (``ir.placed.recomputed.Recomputation``); without it, it runs.
    host: what of that waits in host memory, as the plan lists it; ``meta["on_host"]`` says it of an op.
    """

    name: str
    kind: int
    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    remat: Remat = "none"
    host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Local shape and dtype of a tensor that crosses a stage cut. has_gradient: one comes back over the cut.

    In a program with symbols the sizes of ``shape`` know what they are of them (``ir/sizes.py``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The program of one stage for one microbatch.

    The stage is an environment of named values. It starts with the step inputs (``inputs``: placeholder
    name -> key of the captured step input), the ``received`` tensors, and reads of ``shared_parameters`` and
    ``shared_buffers`` (used by several blocks; under their own dotted names); blocks run in order and add
    their outputs.

    received, sent: tensors from the previous and to the next stage; all are floating point. A tensor needed further
        down passes through every stage between.
    outputs: names of what is asked for: the loss, or all of the model's flat outputs, on the last stage, whichever
        stage computes them; None of the loss elsewhere.
    output_layouts, output_microbatches, output_specs: of each its placements over the mesh, its placement over the
        microbatches (rows of the batch, summands, or the same in each), and its shape in one microbatch.
    loss: name of this microbatch's loss, on the last stage. It is Partial on ``loss_partial_axes``, and the
        losses of all microbatches add up to the loss of the step.
    shard_axes: mesh axes that ZeRO shards over, none without ZeRO; the other data axes replicate the shards.
    zero_units: the stage's parameters that ZeRO divides; none of a program that runs on the parameters of another.
    input_layouts: placeholder name -> layout in which the step input arrives (its batch over the data-parallel
        ranks).
    totals: what to run on every microbatch before the first; the results, added up, are step inputs of all of them
        under the same names, and of the later ``totals``.
    buffer_updates: buffer name -> its value after the step, which every microbatch computes from that before it.
    summed_updates: those of which every microbatch computes a summand.
    sizes: the symbols in shapes and arguments; None of a program for one batch and length.
    trained: the parameters to which a step gives a gradient.
    unread: parameters that the stage holds though its program reads none of them: of ops that the loss does not depend
        on, which other programs of the model may run, and of layers that forward never calls.
    """

    stage: int
    num_stages: int
    mesh: Mesh
    blocks: tuple[BlockProgram, ...]
    inputs: dict[str, str]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    parameters: dict[str, ParameterLayout]
    buffers: dict[str, Buffer]
    constants: dict[str, torch.Tensor]
    shared_parameters: tuple[str, ...]
    shared_buffers: tuple[str, ...]
    buffer_updates: dict[str, str]
    outputs: tuple[str | None, ...]
    output_layouts: tuple[Layout | None, ...]
    loss: str | None
    loss_partial_axes: tuple[int, ...]
    num_microbatches: int
    shard_axes: tuple[int, ...]
    input_layouts: dict[str, Layout]
    totals: tuple[BlockProgram, ...] = ()
    summed_updates: frozenset[str] = frozenset()
    unread: dict[str, ParameterLayout] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    output_microbatches: tuple[Placement, ...] = ()
    output_specs: tuple[TensorSpec, ...] = ()
    zero_units: tuple[ZeroUnit, ...] = ()
    sizes: ProgramSizes | None = None

    @property
    def held(self) -> dict[str, ParameterLayout]:
        """Every parameter that the stage holds."""
        return {**self.parameters, **self.unread}

    @property
    def joint_groups(self) -> frozenset[str]:
        """Names of the groups over several mesh axes, or one, that tokens are dispatched over."""
        nodes = (node for block in (*self.totals, *self.blocks) for node in block.graph.nodes)
        return frozenset(name for node in nodes for name in node.kwargs.get("dispatch_groups", ()))

    @property
    def histories(self) -> tuple[str, ...]:
        """Names of the buffers that are histories of maxima, in order."""
        return tuple(sorted(buffer.name for buffer in self.buffers.values() if buffer.history))

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what every microbatch is given: step inputs, and sums over the whole batch."""
        return (*self.inputs, *(name for block in self.totals for name in block.outputs))


def update_stages(
    programs: Sequence[StageProgram], holders: Sequence[StageProgram] | None = None
) -> dict[str, tuple[int, ...]]:
    """Updated buffer -> the stages that hold it, that which computes its new value first.

    holders: the programs that the stages were made for, if ``programs`` are others that run on them.
    """
    found: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for name in program.buffer_updates:
            others = (p.stage for p in holders or programs if name in p.buffers and p.stage != program.stage)
            found[name] = (program.stage, *others)
    return found
