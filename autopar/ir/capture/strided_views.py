"""``as_strided`` as views that do not depend on how a tensor lies in memory, which is another on every rank.

    x (b, 20, d), strides (20 d, d, 1);  as_strided(x, [b, 8, 6, d], [20 d, 2 d, d, 1])
    unfold(x, 1, 6, 2), its last dimension moved in front of d

Every dimension of the result walks along one dimension of ``x``, or along several neighbours that are one in memory;
where two walk along the same one, they are windows and places in a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.ir.errors import CaptureError
from autopar.ir.source import origin_of

aten = torch.ops.aten

# Adds an op: its target and arguments.
Add = Callable[[Any, tuple[Any, ...]], fx.Node]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Along one dimension of a tensor: where it starts, and the number, size and step of dimensions of the result."""

    start: int
    dims: tuple[tuple[int, int, int], ...]

    @property
    def length(self) -> int:
        return 1 + sum((size - 1) * step for _, size, step in self.dims)


def strided_view(node: fx.Node, x: fx.Node, add: Add) -> fx.Node:
    """``node``, a call of as_strided in a trace, as views of ``x``. Raises CaptureError if no views give that."""
    traced = node.args[0]
    assert isinstance(traced, fx.Node), "a view of a tensor"
    value = traced.meta["val"]
    arguments: Any = node.args[1:]
    size, stride, *more = arguments
    offset: Any = more[0] if more else node.kwargs.get("storage_offset")
    offset = 0 if offset is None else offset - value.storage_offset()
    for dims in _merged(tuple(zip(value.shape, value.stride(), strict=True))):
        walks = _walks(dims, size, stride, offset)
        if walks is not None:
            return _emit(x, value.shape, [n for n, _ in dims], walks, size, stride, add)
    raise CaptureError(
        f"as_strided{tuple(node.args[1:])} of a tensor of shape {tuple(value.shape)} and strides {value.stride()} is "
        f"no window of its dimensions, and a rank has other strides.\n  at {origin_of(node)[1]}\n"
        "  try: unfold, diagonal, or indexing in its place"
    )


def _merged(dims: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The dimensions of a tensor, as sizes and strides, and with neighbours taken as one, fewer of them first."""
    whole = [first[1] == second[0] * second[1] for first, second in pairwise(dims)]
    choices = sorted(range(1 << len(whole)), key=int.bit_count)
    for choice in choices:
        if any(choice >> number & 1 and not fits for number, fits in enumerate(whole)):
            continue
        found = list(dims[:1])
        for number, (n, stride) in enumerate(dims[1:]):
            if choice >> number & 1:
                found[-1] = found[-1][0] * n, stride
            else:
                found.append((n, stride))
        yield tuple(found)


def _walks(
    dims: Sequence[tuple[int, int]], size: Sequence[int], stride: Sequence[int], offset: int
) -> list[_Walk] | None:
    """How the result walks along each dimension; None if it leaves one, or more than two walk along it."""
    order = sorted((d for d in range(len(dims)) if dims[d][0] > 1), key=lambda d: -dims[d][1])
    starts = dict.fromkeys(range(len(dims)), 0)
    for d in order:
        starts[d], offset = divmod(offset, dims[d][1]) if dims[d][1] else (0, offset)
    along: dict[int, list[tuple[int, int, int]]] = {d: [] for d in range(len(dims))}
    for number, (count, step) in enumerate(zip(size, stride, strict=True)):
        if count == 1 or step == 0:
            continue
        fitting = (d for d in order if dims[d][1] and step % dims[d][1] == 0 and step < dims[d][0] * dims[d][1])
        own = next(fitting, None)
        if own is None:
            return None
        along[own].append((number, count, step // dims[own][1]))
    walks = [_Walk(starts[d], tuple(sorted(along[d], key=lambda one: -one[2]))) for d in range(len(dims))]
    fits = all(walk.start >= 0 and walk.start + walk.length <= n for walk, (n, _) in zip(walks, dims, strict=True))
    return walks if fits and offset == 0 and all(len(walk.dims) <= 2 for walk in walks) else None


def _emit(
    x: fx.Node,
    shape: Sequence[int],
    merged: list[int],
    walks: Sequence[_Walk],
    size: Sequence[int],
    stride: Sequence[int],
    add: Add,
) -> fx.Node:
    if list(shape) != merged:
        x = add(aten.reshape.default, (x, merged))
    places: list[int] = []  # of the result, in the order of the dimensions of ``x`` so far
    inside: list[int] = []  # those of places in windows, which come last
    dim = 0
    for n, walk in zip(merged, walks, strict=True):
        if not walk.dims:
            x = add(aten.select.int, (x, dim, walk.start))
            continue
        (number, _, step), *window = walk.dims
        if window:
            if walk.length != n:
                x = add(aten.slice.Tensor, (x, dim, walk.start, walk.start + walk.length))
            ((place, count, spread),) = window
            x = add(aten.unfold.default, (x, dim, (count - 1) * spread + 1, step))
            if spread > 1:
                last = x.meta["val"].dim() - 1
                x = add(aten.slice.Tensor, (x, last, 0, (count - 1) * spread + 1, spread))
            inside.append(place)
        elif walk.length != n or step > 1:
            x = add(aten.slice.Tensor, (x, dim, walk.start, walk.start + walk.length, step))
        places.append(number)
        dim += 1
    found = [*places, *inside]
    if found != sorted(found):
        x = add(aten.permute.default, (x, [found.index(number) for number in sorted(found)]))
    for number in range(len(size)):
        if number not in found:
            x = add(aten.unsqueeze.default, (x, number))
    return x if list(x.meta["val"].shape) == list(size) else add(aten.expand.default, (x, list(size)))
