"""What programs do, as values to compare: those with symbols at some sizes with those that were made for these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.ir.program import BlockProgram, StageProgram, TensorSpec
from autopar.ir.sizes import Point, at
from autopar.ir.torch_private import pytree


def described_programs(programs: Sequence[StageProgram], point: Point) -> list[Any]:
    """Ops, arguments and shapes of all stages, and what goes in and out, at the sizes of ``point``."""
    return [_described_stage(program, point) for program in programs]


def _described_stage(program: StageProgram, point: Point) -> Any:
    crossing = (program.received, program.sent, program.output_specs)
    specs = [tuple(_described_spec(spec, point) for spec in own) for own in crossing]
    blocks = [_described_block(block, point) for block in (*program.totals, *program.blocks)]
    handed = program.outputs, program.output_layouts, program.output_microbatches, program.loss, program.buffer_updates
    return specs, blocks, handed, program.inputs, program.loss_partial_axes, program.summed_updates


def _described_spec(spec: TensorSpec, point: Point) -> Any:
    return spec.name, tuple(at(size, point) for size in spec.shape), spec.dtype, spec.has_gradient


def _described_block(block: BlockProgram, point: Point) -> Any:
    nodes = []
    for node in block.graph.nodes:
        given, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = [leaf.name if isinstance(leaf, fx.Node) else at(leaf, point) for leaf in given]
        leaves = [(type(value), value) for value in values]
        nodes.append((node.op, node.name, node.target if node.op != "output" else "", str(spec), leaves))
    return block.name, block.kind, block.remat, block.inputs, block.outputs, block.parameters, block.buffers, nodes
