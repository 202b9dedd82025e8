"""Whether data-parallel ranks may have batches of different sizes in one step, and be exact all the same.

    rank 0   2 rows of 31 tokens        each runs the programs of its own sizes; what they share is the sum of the loss,
    rank 1   1 row of 8 tokens          the number of its targets, and gradients

That holds if nothing else depends on what other ranks have: no number in the program comes of a size (a mean over rows
divides by their number on all ranks), no tensor of samples crosses a data axis, and no op needs pieces of one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.ir.capture.symbols import BATCH
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.placed.op_communication import op_communication
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.rules.call import op_name
from autopar.ir.sizes import Ratio, Size
from autopar.ir.torch_private import OpOverload, pytree, schema_of

# Bytes of the largest number that ranks may add up, whatever they have of the batch.
_SCALAR_BYTES = 8
# Lowerings whose result does not depend on pieces being equal.
_ANY_PIECES = frozenset({"attention", "cross_entropy", "embedding", "moe", "random"})


def uneven_obstacle(placed: PlacedModel, symbolic: CapturedModel) -> str | None:
    """Why ranks cannot have batches of different sizes; None if they can. symbolic: the capture with symbols."""
    if BATCH not in symbolic.symbols:
        return "its capture holds for one batch size"
    for node in call_nodes(symbolic.graph):
        for what in _numbers(node, symbolic):
            return f"{what} at {node.meta.get('source', 'an unknown line')}"
    axes = {placed.mesh.names[axis] for axis, choice in enumerate(placed.layouts.inputs) if choice is not None}
    for record in op_communication(placed, placed.num_microbatches):
        if axes.intersection(record.axes) and not record.dispatch and record.payload_bytes > _SCALAR_BYTES:
            return f"{record.of} is exchanged between data-parallel ranks ({record.kind})"
    for node in call_nodes(placed.captured.graph):
        rule, choices = placed.analysis.rule(node), placed.layouts.assignments.get(node, ())
        for name, choice in zip(placed.mesh.names, choices, strict=False):
            lowering = rule.lowered.get(choice) if choice is not None and name in axes else None
            if lowering is not None and lowering not in _ANY_PIECES:
                return f"{node.name} needs pieces of one size ({lowering})"
    return None


def _numbers(node: fx.Node, symbolic: CapturedModel) -> Iterator[str]:
    """Numbers that an op computes with and that come of sizes; of counting ones those that come of the batch."""
    for value, kind in _arguments(node):
        if isinstance(value, Ratio) or (isinstance(value, Size) and kind in ("Scalar", "Tensor", "float")):
            if op_name(node.target) == "aten::arange":  # type: ignore[arg-type]  # an op
                if symbolic.symbols[BATCH] in value.expression.free_symbols:
                    yield "rows are counted"
                continue
            yield "a number depends on the size of the batch"


def _arguments(node: fx.Node) -> Iterator[tuple[Any, str]]:
    """Every plain argument of an op with the type that it has in the signature; "" of ops without one."""
    types = {}
    order: list[str] = []
    if isinstance(node.target, OpOverload):
        types = {argument.name: str(argument.type) for argument in schema_of(node.target).arguments}
        order = list(types)
    named = [*zip(order, node.args, strict=False), *node.kwargs.items()]
    for name, value in named if order else [("", node.args), *node.kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            yield leaf, types.get(name, "")
