"""Communication within one group, without gradients: the base of ``collectives`` and of the lowered ops.

``group`` is the name of a process group. All calls block until the result may be used, copy only what is not
laid out as the transport needs it, and can be traced by ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.torch_private import FUNCTIONAL_COLLECTIVES as _ops
from autopar.ir.torch_private import constant_in_graphs, process_group, size_of_group

ReduceOp = Literal["sum", "max", "min"]


def joint_groups(axes: Sequence[str]) -> tuple[str, ...]:
    """Name of the one group over several mesh axes, the first being the major one; none for no axis.

    As names of single axes it stands for a process group until ``bind_groups``.
    """
    return (",".join(axes),) if axes else ()


def axes_of_group(name: str) -> tuple[str, ...]:
    """The mesh axes of a group that is not bound yet."""
    return tuple(name.split(","))


class _Unbound(NamedTuple):
    size: int
    rank: int


_unbound: ContextVar[Mapping[str, _Unbound] | None] = ContextVar("autopar unbound groups", default=None)


@contextmanager
def unbound_groups(mesh: Mesh, coordinates: Mapping[str, int] | None = None) -> Iterator[None]:
    """Within it the axis names of ``mesh`` serve as groups on fake and meta tensors: shapes need no processes.

    coordinates: axis name -> this rank's place on it, 0 where left out.
    """
    places = coordinates or {}
    token = _unbound.set({axis.name: _Unbound(axis.size, places.get(axis.name, 0)) for axis in mesh.axes})
    try:
        yield
    finally:
        _unbound.reset(token)


def _find_unbound(group: str) -> _Unbound | None:
    if torch.compiler.is_compiling():  # a context variable would break the traced graph
        return None
    known = _unbound.get()
    return None if known is None else known.get(group)


_other: ContextVar[Mapping[str, str] | None] = ContextVar("autopar other groups of the same ranks", default=None)


@contextmanager
def over_other_groups(names: Mapping[str, str]) -> Iterator[None]:
    """Within it what this thread sends goes over other groups of the same ranks. names: group -> the other one."""
    token = _other.set(names)
    try:
        yield
    finally:
        _other.reset(token)


def group_at_hand(group: str) -> str:
    """The group that this thread sends over in place of ``group``."""
    if torch.compiler.is_compiling():
        return group
    names = _other.get()
    return group if names is None else names[group]


def group_size(group: str) -> int:
    """Number of ranks in ``group``."""
    unbound = _find_unbound(group)
    return unbound.size if unbound else size_of_group(group)


def group_rank(group: str) -> int:
    """This process's rank in ``group``; the number of the piece that it holds."""
    unbound = _find_unbound(group)
    return unbound.rank if unbound else _rank_in(group)


@constant_in_graphs
def _rank_in(group: str) -> int:
    return int(process_group(group).rank())


def group_all_reduce(x: Tensor, group: str, op: ReduceOp = "sum") -> Tensor:
    """All-reduce: the element-wise sum (or ``op``) of the ranks' tensors, of the shape of ``x``."""
    return cast(Tensor, _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group_at_hand(group))))


def group_all_gather_stacked(x: Tensor, group: str) -> Tensor:
    """All-gather: (N, *x.shape), the ranks' tensors in rank order."""
    flat, size, group = x.contiguous().view(-1), group_size(group), group_at_hand(group)
    if x.device.type == "cpu":
        gathered = torch.ops.autopar.all_gather_as_all_to_all(flat, size, group)
    else:
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(flat, size, group))
    return cast(Tensor, gathered).view(size, *x.shape)


def group_all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    """All-gather: the ranks' tensors concatenated along ``dim`` in rank order."""
    stacked = group_all_gather_stacked(x, group)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


def _pieces(x: Tensor, dim: int, size: int) -> Tensor:
    """(N, *piece): ``x`` cut into equal pieces along ``dim``."""
    return cast(Tensor, x.unflatten(dim, (size, -1)).movedim(dim, 0))


def own_piece(x: Tensor, dim: int, group: str) -> Tensor:
    """This rank's piece of ``x``, a view of 1 / N of it along ``dim``."""
    size = group_size(group)
    length = x.shape[dim] // size
    return x.narrow(dim, group_rank(group) * length, length)


def group_reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    """Reduce-scatter: this rank's piece along ``dim`` of the sum of the ranks' tensors."""
    size = group_size(group)
    pieces, group = _pieces(x, dim, size).contiguous(), group_at_hand(group)
    if x.device.type == "cpu":
        return cast(Tensor, torch.ops.autopar.reduce_scatter_as_all_to_all(pieces, group))
    return cast(
        Tensor,
        _ops.wait_tensor(_ops.reduce_scatter_tensor(pieces, "sum", size, group)),
    ).squeeze(0)


def group_all_to_all(x: Tensor, gather_dim: int, shard_dim: int, group: str) -> Tensor:
    """All-to-all: pieces of ``x`` along ``shard_dim`` for each rank; those received are concatenated along
    ``gather_dim``."""
    received = _all_to_all(_pieces(x, shard_dim, group_size(group)).contiguous(), group_at_hand(group))
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def group_all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """All-to-all of rows, in rank order: (sum of received, ..). sent, received: numbers of rows for and from each
    rank."""
    received_rows = _ops.all_to_all_single(x.contiguous(), list(received), list(sent), group_at_hand(group))
    return cast(Tensor, _ops.wait_tensor(received_rows))


# Collectives of their own on CPUs, so that each is counted and traced as what it stands for.


@torch.library.custom_op("autopar::all_gather_as_all_to_all", mutates_args=())
def _all_gather_as_all_to_all(input_tensor: Tensor, size: int, group_name: str) -> Tensor:
    """All-gather of (n,) to (size * n,) as an all-to-all of copies.

    gloo runs the functional all-gather as "ALLGATHER_COALESCED". The two threads of a group note the name of the last
    work in one string, without a lock, and a name of more than 15 characters is on the heap: now and then it is freed
    twice, which ends the process (torch 2.13; docs/decisions/0015). The all-to-all has a short name and takes 0.65 to
    1.06 times as long (2 and 4 ranks, 256 B to 4 MiB).
    """
    return _all_to_all(input_tensor.expand(size, -1).contiguous(), group_name).view(-1)


@_all_gather_as_all_to_all.register_fake
def _(input_tensor: Tensor, size: int, group_name: str) -> Tensor:
    return input_tensor.new_empty(size * input_tensor.shape[0])


@torch.library.custom_op("autopar::reduce_scatter_as_all_to_all", mutates_args=())
def _reduce_scatter_as_all_to_all(input_tensor: Tensor, group_name: str) -> Tensor:
    """Reduce-scatter of (N, *piece) to (*piece,) as an all-to-all and a local sum.

    gloo's own reduce_scatter moves twice the bytes: it took 1.7 times as long at 2 ranks and 2.1 times at 4
    (1 MiB and 4 MiB pieces, torch 2.13).
    """
    received = _all_to_all(input_tensor, group_name)
    if received.shape[0] == 2:
        return received[0] + received[1]
    return received.sum(0, dtype=received.dtype)


@_reduce_scatter_as_all_to_all.register_fake
def _(input_tensor: Tensor, group_name: str) -> Tensor:
    return input_tensor.new_empty(input_tensor.shape[1:])


def _all_to_all(pieces: Tensor, group: str) -> Tensor:
    """(N, *piece), one for each rank, to (N, *piece), one from each rank."""
    if pieces.is_complex():  # pairs of numbers, which are all that gloo and NCCL know
        return torch.view_as_complex(_all_to_all(torch.view_as_real(pieces), group))
    counts = [1] * pieces.shape[0]
    return cast(
        Tensor,
        _ops.wait_tensor(_ops.all_to_all_single(pieces, counts, counts, group)),
    )
