"""Building blocks for graph rewrites: new nodes that carry what the rest of the compiler reads from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from autopar.ir.sizes import Size, expressed
from autopar.ir.torch_private import FakeTensor, FakeTensorMode, pytree
from autopar.ir.torch_private_symbols import expression_of_symbol, hint_of, is_symbolic, python_kernels, symbolic_size

Operation = Callable[..., Any]

# Types of sizes without symbols.
_STATIC = frozenset({int})

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


def static_value(value: Any, mode: FakeTensorMode) -> Any:
    """A fake value at the sizes of the capture, of one whose sizes are symbols."""

    def static(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return like_shape(leaf, mode) if _has_symbols(leaf) else leaf
        return hint_of(leaf) if is_symbolic(leaf) else leaf

    return static(value) if isinstance(value, torch.Tensor) else pytree.tree_map(static, value)


def like_shape(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of the same shape, strides and dtype, at the sizes of the capture."""
    shape, stride = (tuple(map(_static_size, sizes)) for sizes in (tensor.shape, tensor.stride()))
    on_meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return mode.fake_tensor_converter.from_meta_and_device(mode, on_meta, torch.device("cpu"))


def symbolic_value(target: Operation, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """The fake result of an op whose operands have symbols as sizes; None if they have none, or ops cannot tell."""

    def symbolic(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return argument.meta.get("symbolic", argument.meta["val"])
        return symbolic_size(mode, argument.expression, int(argument)) if isinstance(argument, Size) else argument

    if not _is_sized((args, kwargs)):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten(map(symbolic, leaves), spec)
    try:
        with mode, torch.no_grad(), python_kernels():
            value = getattr(target, "of_any_size", target)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None
    return value if any(map(_has_symbols, pytree.tree_leaves(value))) else None


def _is_sized(argument: Any) -> bool:
    """Whether an operand, or one within it, has symbols as sizes; of most there are none."""
    if isinstance(argument, fx.Node):
        return "symbolic" in argument.meta
    if isinstance(argument, (tuple, list)):
        return any(map(_is_sized, argument))
    return isinstance(argument, Size) or (isinstance(argument, dict) and any(map(_is_sized, argument.values())))


def _static_size(size: Any) -> int:
    return int(hint_of(size)) if isinstance(size, torch.SymInt) else int(size)


def _has_symbols(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _STATIC.issuperset(map(type, value.shape))


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
    symbolic = value if any(map(_has_symbols, pytree.tree_leaves(value))) else None
    if symbolic is None:
        symbolic = symbolic_value(target, args, kwargs or {}, mode)
    if value is None:
        value = fake_call(target, args, kwargs or {}, mode)
    node.meta["val"] = static_value(value, mode)
    if symbolic is not None:
        node.meta["symbolic"] = symbolic
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
    """Shape of a node's tensor, global in a capture and local in the program of a rank; its sizes know what they are of
    the symbols."""
    if "shapes" in node.meta:
        (shape,) = node.meta["shapes"]
        return cast("tuple[int, ...]", shape)
    value = node.meta["val"]
    return _sizes(value, node.meta.get("symbolic", value))


def sizes_of(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Global shapes of all tensors that a node of a capture makes, as of ``shape_of``."""
    values = pytree.tree_leaves(node.meta["val"])
    symbolic = pytree.tree_leaves(node.meta.get("symbolic", node.meta["val"]))
    pairs = zip(values, symbolic, strict=True)
    return tuple(_sizes(value, own) for value, own in pairs if isinstance(value, torch.Tensor))


def _sizes(value: torch.Tensor, symbolic: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(value.shape)
    # Passes ask for all shapes, and most have no symbols.
    if symbolic is value and _STATIC.issuperset(map(type, shape)):
        return shape
    return tuple(
        expressed(size, expression_of_symbol(symbol)) if is_symbolic(symbol) else size
        for size, symbol in zip(shape, symbolic.shape, strict=True)
    )


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of the tensor that a node makes."""
    dtype = node.meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def only_user(node: fx.Node) -> fx.Node | None:
    """The single op that uses a node, None if there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None
