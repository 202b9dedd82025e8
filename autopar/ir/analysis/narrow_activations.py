"""Activations that ranks may gather in 8 bits: of which products read 8-bit floats by one scale, and nothing else does.

    forward     h = all_gather(x)          every reader of h in its block is a product of h by tensor
    backward    g = all_gather(grad of z)  z = reduce_scatter(y): y is made by a product by tensor

The chain of moves that makes h, or z, is that one collective, so that what is quantised is complete.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.graph import tensor_operands
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.op_recipes import scaling_of


def reads_narrow(user: fx.Node, position: int) -> bool:
    """Whether an op reads of its operand ``position``, its input, 8-bit floats by one scale alone."""
    return position == 0 and _by_tensor(user)


def takes_narrow_gradient(node: fx.Node) -> bool:
    """Whether an op reads of the gradient of its result 8-bit floats by one scale alone. A bias reads it as it is."""
    return _by_tensor(node) and len(tensor_operands(node)) == 2


def _by_tensor(node: fx.Node) -> bool:
    scaling = scaling_of(node) if node.target is scaled_linear else None
    return scaling is not None and scaling.has_one_scale
