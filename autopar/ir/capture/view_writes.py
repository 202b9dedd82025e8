"""Writes through views: the base that has a new value where a view of it was written.

copy_(select(x, 0, 1), y)          select_scatter(x, y, 0, 1)
add_(getitem(chunk(x, 2), 1), y)   slice_scatter(x, y', 0, 4, 8), where y' = add(slice(x, 0, 4, 8), y)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# base, new value of the view, arguments of the view after its base -> op and arguments that give the base's new value;
# None for the op if it is the view's.
_Inverse = Callable[[fx.Node, fx.Node, Any], tuple[Any, tuple[Any, ...]]]


def written_base(target: Any, base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The op and its arguments that give ``base`` once ``new`` is in the part that ``target(base, *rest)`` shows.

    The op is None where that is ``new`` itself. The result is None if it is not known how a view by ``target`` is
    written.
    """
    inverse = _INVERSES.get(target)
    return None if inverse is None else inverse(base, new, rest)


def piece(getitem: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """For one of several views that an op makes at once: the op and arguments that make it alone of the same base."""
    producer, index = getitem.args
    assert isinstance(producer, fx.Node) and isinstance(index, int)
    values = producer.meta.get("val")
    if producer.target not in _PIECES or not isinstance(values, (list, tuple)):
        return None
    base = producer.args[0]
    assert isinstance(base, fx.Node) and isinstance(base.meta["val"], Tensor)
    place = 1 if producer.target is aten.unbind.int else 2
    dim = producer.kwargs.get("dim", producer.args[place] if len(producer.args) > place else 0)
    assert isinstance(dim, int)
    index %= len(values)
    if producer.target is aten.unbind.int:
        return aten.select.int, (dim, index)
    start = sum(int(value.shape[dim]) for value in values[:index])
    return aten.slice.Tensor, (dim, start, start + int(values[index].shape[dim]))


def _like_base(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape.default, (new, list(base.meta["val"].shape))


def _same(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return None, ()


def _inverse_permute(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    order = [d % len(rest[0]) for d in rest[0]]
    return aten.permute.default, (new, [order.index(d) for d in range(len(order))])


def _last_two(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.transpose.int, (new, -2, -1)


def _reversed(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.permute.default, (new, list(reversed(range(base.meta["val"].ndim))))


def _narrowed(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    dim, start, length = rest
    size = int(base.meta["val"].shape[dim])
    start %= max(size, 1)
    return aten.slice_scatter.default, (base, new, dim, start, start + length)


_INVERSES: dict[Any, _Inverse] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.detach_.default: _same,
    aten.contiguous.default: _same,
    aten.to.dtype: _same,
    aten.to.dtype_layout: _same,
    aten.to.device: _same,
    aten.to.other: _same,
    aten.type_as.default: _same,
    aten.select.int: lambda base, new, rest: (aten.select_scatter.default, (base, new, *rest)),
    aten.slice.Tensor: lambda base, new, rest: (aten.slice_scatter.default, (base, new, *rest)),
    aten.diagonal.default: lambda base, new, rest: (aten.diagonal_scatter.default, (base, new, *rest)),
    aten.narrow.default: _narrowed,
    aten.view.default: _like_base,
    aten.view_as.default: _like_base,
    aten.reshape.default: _like_base,
    aten.reshape_as.default: _like_base,
    aten.flatten.using_ints: _like_base,
    aten.unflatten.int: _like_base,
    aten.ravel.default: _like_base,
    aten.unsqueeze.default: _like_base,
    aten.squeeze.default: _like_base,
    aten.squeeze.dim: _like_base,
    aten.squeeze.dims: _like_base,
    aten.transpose.int: lambda base, new, rest: (aten.transpose.int, (new, *rest)),
    aten.swapaxes.default: lambda base, new, rest: (aten.transpose.int, (new, *rest)),
    aten.swapdims.default: lambda base, new, rest: (aten.transpose.int, (new, *rest)),
    aten.movedim.int: lambda base, new, rest: (aten.movedim.int, (new, rest[1], rest[0])),
    aten.movedim.intlist: lambda base, new, rest: (aten.movedim.intlist, (new, rest[1], rest[0])),
    aten.t.default: lambda base, new, rest: (aten.t.default, (new,)),
    aten.mT.default: _last_two,
    aten.numpy_T.default: _reversed,
    aten.permute.default: _inverse_permute,
}

# Ops that make several views of their first operand, with the dimension as last argument.
_PIECES = frozenset(
    {
        aten.chunk.default,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
        aten.unbind.int,
    }
)
