"""Building blocks for graph rewrites: new nodes that carry what the rest of the compiler reads from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.torch_private import FakeTensor, FakeTensorMode, pytree

Operation = Callable[..., Any]

# Node metadata that says where an op comes from; rewrites hand it on.
ORIGIN = ("path", "source")


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the fake tensors in ``node.meta["val"]`` belong to; a fresh one if there are none."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def value_of(argument: Any) -> Any:
    """Value of an argument at compile time: the fake value of a node, anything else itself."""
    return fx.node.map_arg(argument, lambda node: node.meta["val"])


def fake_call(target: Operation, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """The fake result of an op on the fake values of its arguments."""
    with mode, torch.no_grad():
        return target(*value_of(args), **value_of(kwargs))


def add_call(
    graph: fx.Graph,
    mode: FakeTensorMode,
    target: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    value: Any = None,
) -> fx.Node:
    """A new op at the graph's insertion point, with the origin of ``like`` and its fake result.

    value: the fake result if it is known already.
    """
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update({key: like.meta[key] for key in ORIGIN if key in like.meta})
    node.meta["val"] = fake_call(target, args, kwargs or {}, mode) if value is None else value
    return node


def remove_dead(graph: fx.Graph) -> int:
    """Erase ops without users, random ones too; placeholders stay. Returns how many went."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            removed += 1
    return removed


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of the tensor that a node makes."""
    dtype = node.meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def only_user(node: fx.Node) -> fx.Node | None:
    """The single op that uses a node, None if there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None
