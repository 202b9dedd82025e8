"""Checks of values and dtypes in an exported graph: they compute nothing, and a plan runs without them.

n = item(all(x > 0)); _assert_scalar(n, "..")        nothing, if no shape or number depends on n
y = masked_select(x, mask)                           nothing, if no op reads y
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.capture.functional_twins import writes
from autopar.ir.torch_private import ASSERT_METADATA, ASSERTIONS, READ_SCALAR
from autopar.ir.torch_private_symbols import is_symbolic

aten = torch.ops.aten

_CHECKS = frozenset(
    {
        *ASSERTIONS,
        ASSERT_METADATA,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        # Of what was known when it was read.
        aten.item.default,
        READ_SCALAR,
    }
)


def drop_value_checks(graph: fx.Graph) -> None:
    """Erase checks, and the numbers and tensors of unknown size that only checks read.

    Other tensors that only checks read are left, as dead ops.
    """
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if node.target in _CHECKS or (any(map(is_symbolic, sizes)) and not writes(node)):
            graph.erase_node(node)
