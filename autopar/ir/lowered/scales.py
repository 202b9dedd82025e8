"""Linear layers in 8-bit floats on shards: their scales are those of whole tensors.

scaled_linear(x, w, recipe='fp8-tensor')        x: rows on dp; w: columns on tp
scaled_linear(x, w, recipe='fp8-tensor', row_groups=('dp',), column_groups=('tp',))

A scale for a tensor is taken over all ranks that hold pieces of it; a scale for each row over those that hold pieces of
the dimension that a product sums, which is another one for each of the three products. Of a tile no rank holds a piece.
Of what ranks gather in 8 bits (``ir.placed.zero_units``, ``passes.narrow_gathers``) the scale is known before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from torch import fx

from autopar.ir.lowered.inside import Inside, LocalSizes, Phase
from autopar.ir.lowered.shards import Groups, axes_with, factors_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops.op_recipes import scaling_of
from autopar.ir.rule import Assignment, FactorRule

# A maximum is a float32.
_BYTES = 4


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces ``scaled_linear``: itself, with the groups that its scales are taken over."""
    rows, depth, columns = _groups(rule, assignment, mesh)
    groups = {"row_groups": rows, "depth_groups": depth, "column_groups": columns}
    return node.target, node.args, {**node.kwargs, **groups}


def inside(node: fx.Node, rule: FactorRule, sizes: LocalSizes) -> Iterator[Inside]:
    """The maxima: on each axis one collective forward and one backward, of all that it shards."""
    scaling = scaling_of(node)
    if scaling is None or scaling.shared is None:
        return
    rows, depth, columns = _groups(rule, sizes.assignment, sizes.mesh)
    of_input, of_weight = sizes.flows(0), sizes.flows(1)
    found: dict[tuple[str, Phase], float] = {}
    if scaling.shared == "tensor":
        maxima, backward = Counter[str](), (*rows, *columns)
        for position, groups in enumerate(((*rows, *depth), (*columns, *depth))):
            maxima.update(() if sizes.gathered(position) else groups)
        found = {(axis, "forward"): float(count) for axis, count in maxima.items()}
        if (of_input or of_weight) and not sizes.gathers_gradient:
            found |= {(axis, "backward"): 1.0 for axis in backward}
    else:
        m, k, n = (prod(rule.sizes[f] for f in factors_of(dims)) * sizes.share(dims) for dims in _dims(rule))
        found = {(axis, "forward"): m + n for axis in depth}
        if of_input:
            found |= {(axis, "backward"): m + k for axis in columns}
        if of_weight:
            found |= {(axis, "backward"): n + k for axis in rows}
    for (axis, phase), count in found.items():
        yield Inside("all_reduce", phase, (axis,), _BYTES * count)


def _dims(rule: FactorRule) -> tuple[Any, Any, Any]:
    """Factors of the rows, of the dimension that is summed, and of the columns."""
    return rule.operands[0][:-1], rule.operands[0][-1:], rule.results[0][-1:]


def _groups(rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Groups, Groups, Groups]:
    rows, depth, columns = (axes_with(factors_of(dims), assignment, mesh) for dims in _dims(rule))
    return rows, depth, columns
