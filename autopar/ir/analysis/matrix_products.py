"""Ops that are one product, of matrices or with a convolution's kernel, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir.ops.composite import columns_linear, scaled_linear
from autopar.ir.torch_private import OpOverload

_NAMES = frozenset({"linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution"})


def is_product(target: object) -> bool:
    """Whether autograd needs nothing but the operands of ``target`` to run its backward.

    What is computed on the way inside other ops (experts, attention) is saved; the result of a product is not.
    """
    if target in (columns_linear, scaled_linear):
        return True
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return target.overloadpacket.__name__ in _NAMES


def every_second(products: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """The products of a block that rematerialisation at level alternate does not save."""
    return products[1::2]
