"""Ops that only name the memory of their operand anew, and the tensor whose memory one uses."""

from __future__ import annotations

from torch import fx

from autopar.ir.graph import source, tensor_operands
from autopar.ir.torch_private import OpOverload, schema_of

# Ops with an alias annotation that nevertheless copy, and views without one.
_COPIES = frozenset({"contiguous", "to", "_to_copy"})
_VIEWS = frozenset({"_unsafe_view", "reshape"})

# One storage: the op that allocates it and the number of its result.
Storage = tuple[fx.Node, int]


def is_view(node: fx.Node) -> bool:
    """Whether an op only names the data of its operand anew."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__
    if name in _VIEWS:
        return True
    if name in _COPIES:
        return False
    returns = schema_of(node.target).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def storage_of(node: fx.Node) -> Storage:
    """The tensor whose memory a tensor uses, looking through views and ``getitem``."""
    while True:
        producer, position = source(node)
        if producer.op != "call_function" or not is_view(producer):
            return producer, position
        node = tensor_operands(producer)[0]
