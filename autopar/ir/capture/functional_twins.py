"""The functional twin of an op that writes.

add_(x, y)                       add(x, y)                     the new value of x
dropout_(x, 0.1, True)           dropout(x, 0.1, True)         the new value of x
div(x, y, out=u)                 div(x, y)                     the new value of u
max(x, 0, out=(v, i))            max(x, 0)                     the new values of v and of i
bernoulli_(x, 0.5)               bernoulli(x, 0.5)
instance_norm(x, .., mean, ..)   what torch's functionalisation makes of it
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.ir.torch_private import Argument, FunctionSchema, OpOverload, overload_of, pytree, schema_of

aten = torch.ops.aten

_RENAMED = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.detach_.default: aten.detach.default,
}


def is_write(argument: Argument) -> bool:
    """Whether an op writes to this argument, by its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def writes(node: fx.Node) -> bool:
    """Whether an op of an exported graph writes to one of its operands, by its schema."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that an op writes to, in order."""
    assert isinstance(node.target, OpOverload)
    found: list[fx.Node] = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if is_write(argument):
            given = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            found += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    return found


def functional_twin(target: OpOverload) -> OpOverload | None:
    """The op with the same operands, bar those that are only written, whose results are the written values."""
    if target in _RENAMED:
        return _RENAMED[target]
    namespace, name = schema_of(target).name.split("::")
    outputs = [argument for argument in schema_of(target).arguments if is_write(argument)]
    is_out = all(argument.kwarg_only for argument in outputs)
    if not is_out and (len(outputs) != 1 or not name.endswith("_") or "List" in str(outputs[0].type)):
        return None
    packet = getattr(getattr(torch.ops, namespace), name if is_out else name.removesuffix("_"), None)
    if packet is None:
        return None
    unnamed = 0 if is_out else 1  # dropout_(self, ..) is written, dropout(input, ..) read
    kept = [a.name for a in schema_of(target).arguments if not (is_out and is_write(a))]
    for overload in sorted(packet.overloads(), key=lambda own: own != overload_of(target)):
        twin = getattr(packet, overload)
        schema = schema_of(twin)
        if (
            not schema.is_mutable
            and [a.name for a in schema.arguments][unnamed:] == kept[unnamed:]
            and len(schema.returns) == len(outputs)
            and _types(schema) == [str(a.type) for a in schema_of(target).arguments if a.name in kept]
        ):
            assert isinstance(twin, OpOverload)
            return twin
    return None


def _types(schema: FunctionSchema) -> list[str]:
    return [str(argument.type) for argument in schema.arguments]


def has_writes(graph: fx.Graph, module: torch.nn.Module) -> bool:
    """Whether any op of a graph writes, those in its regions included."""
    for node in graph.nodes:
        if node.op == "get_attr":
            region = operator.attrgetter(str(node.target))(module)
            if isinstance(region, fx.GraphModule) and has_writes(region.graph, region):
                return True
        elif node.op == "call_function" and writes(node):
            return True
    return False
