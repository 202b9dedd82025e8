"""Values that forward reads of tensors which it makes of constants alone: known while it is traced.

    mask = torch.ones(batch, length); if mask.eq(0).any(): ...        any is False, whatever the step

A tracer has no values. Where the ops behind a tensor read no input, parameter or buffer and draw nothing, they are run
for what they give, writes in place among them, and forward goes on with the number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from autopar.ir.torch_private import FakeTensor, OpOverload, no_modes, no_torch_functions, pytree, schema_of

_READS: tuple[Any, ...] = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
)
# Elements of the largest tensor that is made for it.
_LARGEST = 1 << 26


class ConstantsAreKnown(TorchFunctionMode):
    """Within, what is read of tensors made of constants is a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            leaves, spec = pytree.tree_flatten((args, kwargs or {}))
            known = [_known(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
            if not any(value is None and leaf is not None for value, leaf in zip(known, leaves, strict=True)):
                real_args, real_kwargs = pytree.tree_unflatten(known, spec)
                with no_modes(), no_torch_functions():
                    return func(*real_args, **real_kwargs)
        return func(*args, **(kwargs or {}))


def _known(tensor: FakeTensor) -> Tensor | None:
    """The value of a tensor of the trace that is going on, if constants alone decide it."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    tracer: Any = mode.tracer
    node = getattr(getattr(get_proxy_slot(tensor, tracer, None), "proxy", None), "node", None)
    needed = _needed(node, tracer.root) if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or needed is None:
        return None
    values: dict[fx.Node, Any] = {}
    with no_modes(), no_torch_functions(), torch.no_grad():
        for one in node.graph.nodes:
            if one in needed:
                values[one] = _run(one, values, tracer.root)
    found: Tensor = values[node]
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any], root: Any) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target)).clone()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    assert callable(node.target), "an op"
    return node.target(*args, **kwargs)


def _needed(node: fx.Node, root: Any) -> set[fx.Node] | None:
    """The ops that decide a value, those that write into a tensor on the way among them; None if others do too."""
    writes = [(one, operand) for one in node.graph.nodes for operand in _written(one)]
    needed: set[fx.Node] = set()
    left = [node]
    # Not by ``op_graph``: what is needed is small, and the graph of a whole trace takes 3 ms for each value read.
    while left:
        while left:
            one = left.pop()
            if one in needed:
                continue
            if not _is_constant(one, root):
                return None
            needed.add(one)
            left += one.all_input_nodes
        storages = {_storage(one) for one in needed}
        left = [one for one, operand in writes if one not in needed and _storage(operand) in storages]
    return needed


def _is_constant(node: fx.Node, root: Any) -> bool:
    if node.op == "get_attr":
        value = getattr(root, str(node.target), None)
        return isinstance(value, Tensor) and not isinstance(value, (FakeTensor, torch.nn.Parameter))
    if node.op != "call_function":
        return False
    if node.target is not operator.getitem:
        if not isinstance(node.target, OpOverload):
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
    values = pytree.tree_leaves(node.meta.get("val"))
    return all(not isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in values) and all(
        v.numel() <= _LARGEST for v in values if isinstance(v, Tensor)
    )


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that an op writes into."""
    if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
        for number, argument in enumerate(schema_of(node.target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))


def _storage(node: fx.Node) -> fx.Node:
    """The op that made the memory that a result is in, as far as signatures of ops say."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            (node, *_) = node.all_input_nodes
            continue
        if not isinstance(node.target, OpOverload):
            break
        schema = schema_of(node.target)
        shared = any(result.alias_info is not None for result in schema.returns)
        operand = next(
            (
                node.args[number]
                for number, argument in enumerate(schema.arguments[: len(node.args)])
                if argument.alias_info is not None and isinstance(node.args[number], fx.Node)
            ),
            None,
        )
        if not shared or not isinstance(operand, fx.Node):
            break
        node = operand
    return node
