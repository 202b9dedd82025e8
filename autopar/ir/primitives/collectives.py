"""Differentiable collectives: the functions that a sharded graph calls where a placement changes.

One function per forward kind of ``redistribution.Step``; ``backward`` names the conjugate that the gradient
goes through. ``group`` is a mesh axis until ``bind_groups`` puts the name of a process group in its place:

    h   = all_gather(x, dim=1, group='tp', backward='reduce_scatter')
    h_1 = all_gather(x, dim=1, group='7', backward='reduce_scatter')

All tensors are local; N is the size of the group, and a rank's piece number is its rank in the group. The
same calls run on NCCL and gloo, under FakeTensorMode and under ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from autopar.ir.mesh import Mesh
from autopar.ir.primitives.group_communication import (
    group_all_gather,
    group_all_reduce,
    group_all_to_all,
    group_reduce_scatter,
    group_size,
    own_piece,
)
from autopar.ir.redistribution import Collective, Step

__all__ = [
    "COLLECTIVES",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply",
    "bind_groups",
    "communicates_backward",
    "divide",
    "groups_of",
    "identity",
    "reduce_scatter",
    "split",
    "step_call",
]

# Autograd. Each class runs a plain collective and, backwards, its conjugate.


def communicates_backward(ctx: Any) -> None:
    """Marks an op, by the context of its forward, as one whose backward communicates.

    Where the backward is split (``runtime/split_backward.py``), such an op runs in one of its two passes alone.
    """
    ctx.communicates = True


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        communicates_backward(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return group_all_reduce(grad, ctx.group), None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return x / group_size(group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        communicates_backward(ctx)
        # A copy: a view would keep the whole of x alive for backward.
        return own_piece(x, dim, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return group_all_gather(grad, ctx.dim, ctx.group), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, backward: str) -> Tensor:
        ctx.dim, ctx.group, ctx.conjugate = dim, group, backward
        if backward == "reduce_scatter":
            communicates_backward(ctx)
        return group_all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.conjugate == "reduce_scatter":
            return group_reduce_scatter(grad, ctx.dim, ctx.group), None, None, None
        return own_piece(grad, ctx.dim, ctx.group), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, backward: str) -> Tensor:
        ctx.group, ctx.conjugate = group, backward
        if backward == "all_reduce":
            communicates_backward(ctx)
        return group_all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.conjugate == "all_reduce":
            return group_all_reduce(grad, ctx.group), None, None
        return grad, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        communicates_backward(ctx)
        return group_reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return group_all_gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather_dim: int, shard_dim: int, group: str) -> Tensor:
        ctx.dims, ctx.group = (gather_dim, shard_dim), group
        communicates_backward(ctx)
        return group_all_to_all(x, gather_dim, shard_dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gather_dim, shard_dim = ctx.dims
        return group_all_to_all(grad, shard_dim, gather_dim, ctx.group), None, None, None


# The functions that graphs call.


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """The typed form of ``function.apply``."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def identity(x: Tensor, *, group: str, backward: Literal["all_reduce"] = "all_reduce") -> Tensor:
    """``x`` itself, used by every rank on its own part: the gradient is the sum of the ranks' gradients."""
    return cast(Tensor, apply(_Identity, x, group))


def divide(x: Tensor, *, group: str) -> Tensor:
    """``x / N``, so that the sum over the group is ``x``. Each summand's gradient is already x's."""
    return cast(Tensor, apply(_Divide, x, group))


def split(x: Tensor, *, dim: int, group: str) -> Tensor:
    """This rank's of N equal pieces of ``x`` along ``dim``. Backward: all_gather."""
    return cast(Tensor, apply(_Split, x, dim, group))


def all_gather(x: Tensor, *, dim: int, group: str, backward: Literal["split", "reduce_scatter"] = "split") -> Tensor:
    """The ranks' pieces concatenated along ``dim``."""
    return cast(Tensor, apply(_AllGather, x, dim, group, backward))


def all_reduce(x: Tensor, *, group: str, backward: Literal["none", "all_reduce"] = "none") -> Tensor:
    """The sum of the ranks' tensors. ``backward``: "none" if all ranks use the sum alike."""
    return cast(Tensor, apply(_AllReduce, x, group, backward))


def reduce_scatter(x: Tensor, *, dim: int, group: str) -> Tensor:
    """This rank's piece along ``dim`` of the sum of the ranks' tensors. Backward: all_gather."""
    return cast(Tensor, apply(_ReduceScatter, x, dim, group))


def all_to_all(x: Tensor, *, gather_dim: int, shard_dim: int, group: str) -> Tensor:
    """From pieces along ``gather_dim`` to pieces along ``shard_dim``. Backward: the reverse."""
    return cast(Tensor, apply(_AllToAll, x, gather_dim, shard_dim, group))


COLLECTIVES: frozenset[Callable[..., Tensor]] = frozenset(
    {identity, divide, split, all_gather, all_reduce, reduce_scatter, all_to_all}
)


def step_call(step: Step, mesh: Mesh) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The function and keywords that carry out ``step``, with the axis of ``mesh`` as group."""
    group = mesh.axes[step.axis].name
    back = step.backward.value
    match step.forward:
        case Collective.NONE:
            return identity, {"group": group, "backward": back}
        case Collective.DIVIDE:
            return divide, {"group": group}
        case Collective.SPLIT:
            return split, {"dim": step.shard_dim, "group": group}
        case Collective.ALL_GATHER:
            return all_gather, {"dim": step.gather_dim, "group": group, "backward": back}
        case Collective.ALL_REDUCE:
            return all_reduce, {"group": group, "backward": back}
        case Collective.REDUCE_SCATTER:
            return reduce_scatter, {"dim": step.shard_dim, "group": group}
        case Collective.ALL_TO_ALL:
            return all_to_all, {"gather_dim": step.gather_dim, "shard_dim": step.shard_dim, "group": group}


def bind_groups(graph: fx.Graph, names: Mapping[str, str]) -> None:
    """Rewrite, in place, every ``group`` and ``*groups`` keyword in ``graph`` from mesh axes to process groups.

    names: axis name -> name of this rank's process group along it; of several axes, as ``joint_groups`` names them.
    Raises KeyError for one left out.
    """
    for node in graph.nodes:
        bound = {key: tuple(names[name] for name in axes) for key, axes in groups_of(node).items()}
        if bound:
            node.kwargs = {**node.kwargs, **bound, **({"group": bound["group"][0]} if "group" in bound else {})}


def groups_of(node: fx.Node) -> dict[str, tuple[str, ...]]:
    """The keywords of a call that name groups, with the names."""
    found: dict[str, tuple[str, ...]] = {}
    for key, value in node.kwargs.items():
        if key == "group" and isinstance(value, str):
            found[key] = (value,)
        elif key.endswith("groups") and isinstance(value, (tuple, list)):  # a number of a convolution is not ours
            found[key] = tuple(map(str, value))
    return found
