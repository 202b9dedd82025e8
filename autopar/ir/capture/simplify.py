"""One sweep that removes what changes no value: asserts, no-op casts and views, copies, repeated and dead ops.

Afterwards every view is an ``aten.reshape`` with explicit sizes, so no op depends on strides, and constants
name no device but the CPU (the runtime puts its own in).

    to(x, float32)  x is float32          x
    contiguous(transpose(x)), view        reshape(transpose(x))
    detach(x)       x needs no gradient   x
    mul(x, 1.0), dropout(x, 0.0, True)    x
    cat([x, an empty tensor])             x
    cos(f), cos(f)                        one cos(f)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ir.autograd.function_op import is_own
from autopar.ir.building import remove_dead, shape_of, sizes_of
from autopar.ir.sizes import same_sizes
from autopar.ir.torch_private import ASSERT_METADATA, ASSERTIONS, TO_COPY, UNSAFE_VIEW, OpOverload

aten = torch.ops.aten

_DROPPED = {
    ASSERT_METADATA,
    *ASSERTIONS,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_COPIES = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}
_CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    TO_COPY,
    aten.type_as.default,
}
_RESHAPES = {
    aten.view.default,
    UNSAFE_VIEW,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
}
# Same value if the result has the operand's shape.
_VIEWS = {
    aten.expand.default,
    aten.expand_as.default,
    aten.slice.Tensor,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.repeat.default,
    aten.constant_pad_nd.default,
}
_IDENTITY_SCALARS: dict[Any, float] = {
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
    aten.add.Tensor: 0,
    aten.add.Scalar: 0,
    aten.sub.Tensor: 0,
    aten.sub.Scalar: 0,
    aten.pow.Tensor_Scalar: 1,
}
_DROPOUTS = {
    aten.dropout.default: 2,
    aten.alpha_dropout.default: 2,
    aten.feature_dropout.default: 2,
    aten.feature_alpha_dropout.default: 2,
    aten.native_dropout.default: 2,
}
_SOMETIMES_IDENTITY = {
    aten.cat.default,
    aten.detach.default,
    aten.transpose.int,
    aten.permute.default,
    *_COPIES,
    *_RESHAPES,
    *_CASTS,
    *_VIEWS,
    *_IDENTITY_SCALARS,
    *_DROPOUTS,
}
_FOLDABLE_KWARGS = ("pin_memory", "layout", "memory_format", "non_blocking")


def simplify(graph: fx.Graph, *, differentiable: set[fx.Node]) -> None:
    """Simplify in place. ``differentiable``: placeholders that gradients are wanted for."""
    needs_grad = set(differentiable)
    seen: dict[Any, fx.Node] = {}
    with torch.no_grad():
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _DROPPED:
                graph.erase_node(node)
                continue
            _canonical(node)
            same = _same_value(node, needs_grad)
            key = None
            if same is None and not _stays_apart(node):
                key = _key(node)
                same = seen.get(key)
            if same is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                continue
            if key is not None:
                seen[key] = node
            if node.target is not aten.detach.default and any(n in needs_grad for n in node.all_input_nodes):
                needs_grad.add(node)
    remove_dead(graph)


def _canonical(node: fx.Node) -> None:
    """Bring an op to its one spelling, in place."""
    value = node.meta["val"]
    if node.target in _RESHAPES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target is aten.reshape.default:
            source = source.args[0]
        node.target, node.args, node.kwargs = aten.reshape.default, (source, list(shape_of(node))), {}
    elif node.target is aten.chunk.default:
        source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
        assert isinstance(dim, int)
        node.target = aten.split.Tensor
        node.args, node.kwargs = (source, sizes_of(node)[0][dim], dim), {}
    elif node.target in _CASTS:
        node.target, node.args, node.kwargs = TO_COPY, (node.args[0],), {"dtype": value.dtype}
    elif node.target is aten.expand_as.default:
        node.target, node.args = aten.expand.default, (node.args[0], list(shape_of(node)))
    elif node.target is aten.slice.Tensor and len(node.args) > 2 and node.args[2] is None:
        node.args = (*node.args[:2], 0, *node.args[3:])
    elif node.target is aten.cat.default:
        parts, *dim = node.args
        assert isinstance(parts, (list, tuple))
        node.args = ([part for part in parts if not _adds_nothing(part, value)] or list(parts), *dim)
    elif any(key in node.kwargs for key in _FOLDABLE_KWARGS):
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _FOLDABLE_KWARGS}
    if node.target is aten.expand.default:
        node.args, node.kwargs = (node.args[0], list(shape_of(node))), {}


def _adds_nothing(part: Any, whole: torch.Tensor) -> bool:
    """Whether a concatenation is the same without ``part``: it is empty and of no wider dtype."""
    value = part.meta["val"]
    return not value.numel() and value.dtype == whole.dtype


def _same_value(node: fx.Node, needs_grad: set[fx.Node]) -> fx.Node | None:
    """The operand that an op returns unchanged, if it does."""
    if node.target not in _SOMETIMES_IDENTITY:
        return None
    source = node.args[0] if node.args else None
    if node.target is aten.cat.default and isinstance(source, (list, tuple)) and len(source) == 1:
        source = source[0]
    if not isinstance(source, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return None
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    before, after = source.meta["val"], node.meta["val"]
    if not same_sizes(shape_of(source), shape_of(node)) or before.dtype != after.dtype:
        return None
    target = node.target
    if target is aten.cat.default or target in _COPIES or target in _RESHAPES or target in _CASTS or target in _VIEWS:
        return source
    if target in _IDENTITY_SCALARS:
        return source if _is_number(node.args[1], _IDENTITY_SCALARS[target]) and not node.kwargs else None
    if target is aten.detach.default:
        return None if source in needs_grad else source
    if target in _DROPOUTS:
        return source if node.args[1] == 0 or not node.args[2] else None
    if target is aten.transpose.int:
        rank = before.dim()
        return source if _as_int(node.args[1]) % rank == _as_int(node.args[2]) % rank else None
    if target is aten.permute.default:
        order = node.args[1]
        assert isinstance(order, (list, tuple))
        return source if [_as_int(d) % before.dim() for d in order] == list(range(before.dim())) else None
    return None


def _stays_apart(node: fx.Node) -> bool:
    """Whether two calls are not one: of a random op, or of a function whose backward need not be linear."""
    target = node.target
    if is_own(target):
        return True
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _key(node: fx.Node) -> Any:
    return (node.target, _frozen(node.args), _frozen(node.kwargs))


def _frozen(argument: Any) -> Any:
    """A hashable twin of an argument; 1, 1.0 and True stay different."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in argument.items()))
    if isinstance(argument, float) and math.isnan(argument):
        return (float, "nan")
    return (type(argument), argument, getattr(argument, "expression", None))


def _is_number(argument: Any, number: float) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool) and argument == number


def _as_int(argument: Any) -> int:
    assert isinstance(argument, int)
    return argument
