"""Values and ops of a local program while it is typed, over all stages: what the backward is typed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.passes.verify.types import Mistyped, Summands, Type


@dataclass(slots=True, eq=False)
class Value:
    """A value of a program. types: each of which it has; more than one only where the sizes leave several axes.

    needs_gradient: whether autograd computes one, if it is asked for. gradients: what its users hand back: the type
    that they took it for, where that gradient is a summand, and the user.
    """

    types: tuple[Type, ...]
    needs_gradient: bool = False
    gradients: list[tuple[Type, Summands, str]] = field(default_factory=list)

    def gradient(self, mesh: Mesh) -> tuple[Type, Summands] | None:
        """The type that all users took it for, and where their gradients are summands; None if there is none.

        Raises Mistyped if users differ: their gradients are added up.
        """
        if not self.gradients:
            return None
        first, summands, user = self.gradients[0]
        for other, more, another in self.gradients[1:]:
            if other != first:
                raise Mistyped(f"{user} uses it as {first.show(mesh)}, {another} as {other.show(mesh)}")
            if more != summands:
                name = mesh.names[min(more ^ summands)]
                one, two = (user, another) if min(more ^ summands) in summands else (another, user)
                raise Mistyped(
                    f"its gradients cannot be added up: on {name} that of {one} is a summand (Partial()), and that of "
                    f"{two} is whole on each rank.\n  expected: a collective whose backward is an all_reduce or a "
                    f"reduce_scatter ahead of {one}, or none ahead of {two}"
                )
        return first, summands


class Way(Protocol):
    """How an op hands gradients back: from where that of its results is a summand to the same of its operands."""

    def backward(self, summands: Summands, mesh: Mesh) -> Sequence[Summands]:
        """For each operand, the axes on which its gradient is a summand, from those of the result's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """One way to type a call: the types that it takes its operands for, those of its results, and its backward."""

    operands: tuple[Type, ...]
    results: tuple[Type | None, ...]
    way: Way


@dataclass(slots=True, eq=False)
class Call:
    """A typed call. place: of the node, for messages."""

    node: fx.Node
    place: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    derivations: tuple[Derivation, ...]


@dataclass(frozen=True, slots=True)
class Same:
    """The gradient of the result is that of the operand; on ``divided`` axes it becomes a summand."""

    divided: Summands = frozenset()

    def backward(self, summands: Summands, mesh: Mesh) -> tuple[Summands, ...]:
        """The axes of the result's gradient, and the divided ones."""
        return (summands | self.divided,)
