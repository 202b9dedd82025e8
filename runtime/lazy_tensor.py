"""Tensors that are read when they are needed, and only the part of them that is.

    weight = files["model.embed_tokens.weight"]      # a shape and a dtype
    mine = weight.narrow(0, 4096, 1024)              # still nothing read
    parameter.copy_(mine)                            # reads 1024 rows

Slices, pieces, concatenations, stacks and transpositions of lazy tensors read no more than what is asked of them. Any
other op is put off too, but has its operands read whole when its result is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from autopar.ir.torch_private import TO_COPY, no_torch_function, pytree, wrapper

# (start, length) of what is wanted along each dimension.
Box = tuple[tuple[int, int], ...]
Fetch = Callable[[Box], torch.Tensor]
Key = TypeVar("Key")

aten = torch.ops.aten


class LazyTensor(torch.Tensor):
    """A tensor on the CPU that is known by shape and dtype. It has no gradient and cannot be written to."""

    fetch: Fetch

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, fetch: Fetch) -> LazyTensor:
        """fetch: gives the plain tensor inside a box."""
        device = torch.device("cpu")
        made: LazyTensor = wrapper(cls, torch.empty(shape, device="meta"), dtype, device)
        made.fetch = fetch
        return made

    def read(self) -> torch.Tensor:
        """The whole of it, as a plain tensor, which may be a view of something that stays as it is."""
        return self.fetch(tuple((0, size) for size in self.shape))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # ops arrive one level below

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            assert not isinstance(target, LazyTensor), "a lazy tensor is not written to"
            return target.copy_(source.read())
        known = _KNOWN.get(func)
        found = None if known is None else known(*args, **kwargs)
        return _put_off(func, args, kwargs) if found is None else found


def _same(x: LazyTensor, *_: Any, **__: Any) -> LazyTensor:
    return LazyTensor(x.shape, x.dtype, x.fetch)


def _cast(x: LazyTensor, *, dtype: torch.dtype | None = None, **_: Any) -> LazyTensor:
    return LazyTensor(x.shape, dtype or x.dtype, lambda box: x.fetch(box).to(dtype or x.dtype))


def _window(x: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    def fetch(box: Box) -> torch.Tensor:
        return x.fetch((*box[:dim], (start + box[dim][0], box[dim][1]), *box[dim + 1 :]))

    return LazyTensor((*x.shape[:dim], length, *x.shape[dim + 1 :]), x.dtype, fetch)


def _slice(
    x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor | None:
    if step != 1:
        return None
    dim %= x.dim()
    first, stop, _ = slice(start, end).indices(x.shape[dim])
    return _window(x, dim, first, max(0, stop - first))


def _select(x: LazyTensor, dim: int, index: int) -> LazyTensor:
    dim, index = dim % x.dim(), index % x.shape[dim]

    def fetch(box: Box) -> torch.Tensor:
        return x.fetch((*box[:dim], (index, 1), *box[dim:])).select(dim, 0)

    return LazyTensor((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype, fetch)


def _unbind(x: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _split_sizes(x: LazyTensor, sizes: Sequence[int], dim: int = 0) -> list[LazyTensor]:
    dim %= x.dim()
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_window(x, dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _split(x: LazyTensor, size: int, dim: int = 0) -> list[LazyTensor]:
    whole = x.shape[dim]
    return _split_sizes(x, [min(size, whole - start) for start in range(0, whole, size)] or [0], dim)


def _squeeze(x: LazyTensor, dim: int) -> LazyTensor:
    return _select(x, dim, 0) if x.shape[dim] == 1 else _same(x)


def _permute(x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    order = [dim % x.dim() for dim in dims]

    def fetch(box: Box) -> torch.Tensor:
        return x.fetch(tuple(box[order.index(dim)] for dim in range(len(order)))).permute(order)

    return LazyTensor([x.shape[dim] for dim in order], x.dtype, fetch)


def _transpose(x: LazyTensor, first: int, second: int) -> LazyTensor:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permute(x, order)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    parts = [as_lazy(tensor) for tensor in tensors]
    dim %= parts[0].dim()
    if len({(part.dtype, part.dim(), *part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
        return None
    lengths = [part.shape[dim] for part in parts]

    def fetch(box: Box) -> torch.Tensor:
        found, begin = [], 0
        for part, size in zip(parts, lengths, strict=True):
            start, stop = max(box[dim][0], begin), min(sum(box[dim]), begin + size)
            if start < stop:
                found.append(part.fetch((*box[:dim], (start - begin, stop - start), *box[dim + 1 :])))
            begin += size
        return found[0] if len(found) == 1 else torch.cat(found, dim) if found else _empty(box, parts[0].dtype)

    return LazyTensor((*parts[0].shape[:dim], sum(lengths), *parts[0].shape[dim + 1 :]), parts[0].dtype, fetch)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    parts = [as_lazy(tensor) for tensor in tensors]
    if len({(part.dtype, part.shape) for part in parts}) > 1:
        return None
    shape = parts[0].shape
    dim %= len(shape) + 1

    def fetch(box: Box) -> torch.Tensor:
        start, length = box[dim]
        inside = (*box[:dim], *box[dim + 1 :])
        found = [part.fetch(inside) for part in parts[start : start + length]]
        return torch.stack(found, dim) if found else _empty(box, parts[0].dtype)

    return LazyTensor((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype, fetch)


def as_lazy(value: torch.Tensor) -> LazyTensor:
    """A tensor as a lazy one."""
    if isinstance(value, LazyTensor):
        return value
    return LazyTensor(value.shape, value.dtype, lambda box: cut(value, box))


def cut(value: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``value`` inside a box."""
    for dim, (start, length) in enumerate(box):
        value = value.narrow(dim, start, length)
    return value


def _empty(box: Box, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty([length for _, length in box], dtype=dtype)


def _put_off(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an op, each of which runs it when it is read."""
    kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.device)}
    abstract = pytree.tree_map_only(
        LazyTensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs)
    )
    leaves, spec = pytree.tree_flatten(func(*abstract[0], **abstract[1]))

    def result(number: int, box: Box) -> torch.Tensor:
        real = pytree.tree_map_only(LazyTensor, lambda x: x.read().contiguous(), (args, kwargs))
        return cut(pytree.tree_leaves(func(*real[0], **real[1]))[number], box)

    def later(number: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return LazyTensor(leaf.shape, leaf.dtype, lambda box: result(number, box))

    return pytree.tree_unflatten([later(number, leaf) for number, leaf in enumerate(leaves)], spec)


# What each op gives; None if it cannot be told from the op's arguments.
_KNOWN: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.cat.default: _cat,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.squeeze.dim: _squeeze,
    aten.stack.default: _stack,
    aten.t.default: lambda x: _permute(x, range(x.dim())[::-1]),
    aten.transpose.int: _transpose,
    aten.unbind.int: _unbind,
    TO_COPY: _cast,
}


class LastRead(Generic[Key]):
    """A function that remembers its last result, so that several parts of one tensor are read one after the other."""

    def __init__(self, read: Callable[[Key], torch.Tensor]) -> None:
        self._read = read
        self._last: tuple[Key, torch.Tensor] | None = None

    def __call__(self, key: Key) -> torch.Tensor:
        """key: known by its identity."""
        if self._last is None or self._last[0] is not key:
            self._last = None
            self._last = key, self._read(key)
        return self._last[1]
