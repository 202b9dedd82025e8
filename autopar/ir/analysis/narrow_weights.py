"""Weights that ranks may gather in 8 bits: of which nothing is read but 8-bit floats by one scale.

    linear(x, w)                                     w is gathered as it is computed with
    scaled_linear(x, w, recipe='fp8-tensor')         w is read as 8-bit floats, by one scale: gathered in 8 bits
    scaled_linear(x, w, recipe='fp8-row')            backward reads w by other scales than forward

The largest magnitude of a weight is that of its pieces, and each piece is quantised by it as the whole would be. Of
scales by row and by tile forward and backward have others for the same number, or a tile may be on two ranks.
"""

from __future__ import annotations

from autopar.ir.graph import CapturedModel, op_nodes, tensor_operands
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.op_recipes import scaling_of

# Position of the weight among the operands of a linear layer.
_WEIGHT = 1


def narrow_weights(captured: CapturedModel) -> frozenset[str]:
    """Placeholder names of the parameters that one linear layer reads by a scale for the tensor, and nothing else."""
    alone: dict[str, bool] = {}
    for node in op_nodes(captured.graph):
        scaling = scaling_of(node) if node.target is scaled_linear else None
        for position, operand in enumerate(tensor_operands(node)):
            if operand.name in captured.parameters:
                by_one_scale = position == _WEIGHT and scaling is not None and scaling.has_one_scale
                alone[operand.name] = by_one_scale and operand.name not in alone
    return frozenset(name for name, own in alone.items() if own)
