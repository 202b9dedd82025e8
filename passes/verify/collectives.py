"""Types of collectives: each changes one placement, and hands a gradient back through its conjugate.

    on the axis           value        gradient of the result -> of the operand
    identity              R -> R       summand -> whole
    divide                R -> P       whole -> whole
    split                 R -> S       piece -> whole
    all_gather            S -> R       backward="split": whole -> piece; "reduce_scatter": summand -> piece
    all_reduce            P -> R       backward="none": whole -> whole; "all_reduce": summand -> whole
    reduce_scatter        P -> S       piece -> whole
    all_to_all            S(i) -> S(j) piece -> piece

A value that an axis does not shard has a gradient that is whole or a summand there; pieces have pieces (``types``).
Where two axes shard one dimension the later one is the minor one: it is cut last and put together first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.primitives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    divide,
    identity,
    reduce_scatter,
    split,
)
from autopar.passes.verify.types import Mistyped, Summands, Type, spell


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The change of placement by a collective on ``axis``.

    before, after: placements. expects: whether the gradient of its result has to be a summand on the axis. Where the
    operand is replicated its gradient is whole there: no collective hands back a summand.
    """

    axis: int
    before: Placement
    after: Placement
    expects: bool = False

    def apply(self, operand: Type, mesh: Mesh) -> Type:
        """Type of the result. Raises Mistyped."""
        found = operand.layout[self.axis]
        if found != self.before:
            raise Mistyped(
                f"its operand is {operand.show(mesh)}; expected {spell(self.before)} on {mesh.names[self.axis]}, "
                f"got {spell(found)}"
            )
        for placement in (self.before, self.after):
            if isinstance(placement, Shard):
                self._check_minor(placement, operand, mesh)
        moved = operand.on(self.axis, self.after)
        if isinstance(self.after, Shard):
            _check_divides(operand, self.after.dim, mesh.sizes[self.axis], mesh)
            if any(order.dim == self.after.dim and order.inner > 1 for order in operand.zigzag):
                _check_positions(moved, mesh)
        return moved

    def _check_minor(self, placement: Shard, operand: Type, mesh: Mesh) -> None:
        for later in range(self.axis + 1, len(mesh)):
            if operand.layout[later] == placement:
                raise Mistyped(
                    f"its operand is {operand.show(mesh)}: {mesh.names[later]} cuts the pieces of dimension "
                    f"{placement.dim} that {mesh.names[self.axis]} has, and has to leave it before"
                )

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        """Where the gradient of the operand is a summand, if that of the result is so on ``summands``."""
        if mesh.sizes[self.axis] > 1 and (self.axis in summands) != self.expects:
            name = mesh.names[self.axis]
            got, wanted = (_title(self.axis in summands), _title(self.expects))
            raise Mistyped(f"the gradient of its result is {got} on {name}; its backward expects {wanted}")
        return (summands - {self.axis},)


def _title(is_summand: bool) -> str:
    return "a summand (Partial())" if is_summand else "whole on each rank"


def _check_divides(operand: Type, dim: int, size: int, mesh: Mesh) -> None:
    shape = operand.shape(mesh)
    if not 0 <= dim < len(shape) or shape[dim] % size:
        raise Mistyped(f"its operand has the local shape {shape}, of which dimension {dim} has no {size} equal pieces")


def _check_positions(moved: Type, mesh: Mesh) -> None:
    """Pieces of a sequence in zigzag order hold whole positions."""
    shape = moved.shape(mesh)
    for order in moved.zigzag:
        if shape[order.dim] % order.inner:
            raise Mistyped(f"it cuts a position of the sequence in dimension {order.dim} into parts")


def move_of(node: fx.Node, mesh: Mesh) -> Move | None:
    """The change of placement by a call, if it is a collective; else None. Raises Mistyped for options that none
    has."""
    make = _MOVES.get(node.target)  # type: ignore[arg-type]  # a target of another kind is not in the table
    if make is None:
        return None
    options = dict(node.kwargs)
    group = options.pop("group", None)
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or group not in mesh.names[1:]:
        raise Mistyped(f"expected one operand and a group among the mesh axes {mesh.names[1:]}, got {group!r}")
    try:
        before, after, expects = make(**options)
    except (TypeError, KeyError) as error:
        raise Mistyped(f"these are not options of this collective: {options} ({error})") from error
    return Move(axis=mesh.index(str(group)), before=before, after=after, expects=expects)


_Ends = tuple[Placement, Placement, bool]


def _identity(backward: str = "all_reduce") -> _Ends:
    return Replicate(), Replicate(), {"all_reduce": True}[backward]


def _divide() -> _Ends:
    return Replicate(), Partial(), False


def _split(dim: int) -> _Ends:
    return Replicate(), Shard(dim), False


def _all_gather(dim: int, backward: str = "split") -> _Ends:
    return Shard(dim), Replicate(), {"split": False, "reduce_scatter": True}[backward]


def _all_reduce(backward: str = "none") -> _Ends:
    return Partial(), Replicate(), {"none": False, "all_reduce": True}[backward]


def _reduce_scatter(dim: int) -> _Ends:
    return Partial(), Shard(dim), False


def _all_to_all(gather_dim: int, shard_dim: int) -> _Ends:
    return Shard(gather_dim), Shard(shard_dim), False


def _narrow_all_gather(dim: int, recipe: str, maxima_groups: tuple[str, ...], backward: str = "split") -> _Ends:
    return _all_gather(dim, backward)


def _narrowing_reduce_scatter(dim: int, recipe: str, maxima_groups: tuple[str, ...]) -> _Ends:
    return _reduce_scatter(dim)


_MOVES: dict[Any, Callable[..., _Ends]] = {
    identity: _identity,
    divide: _divide,
    split: _split,
    all_gather: _all_gather,
    all_reduce: _all_reduce,
    reduce_scatter: _reduce_scatter,
    all_to_all: _all_to_all,
    narrow_all_gather: _narrow_all_gather,
    narrowing_reduce_scatter: _narrowing_reduce_scatter,
}
