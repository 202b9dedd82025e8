"""Types of local values: which global tensor, which piece of it, in which order.

    x_1: x, Shard(0) on dp, Replicate() on tp         the rows of ``x`` that this rank of dp has

A layout has the microbatch in front, as an axis of its own (``TIME``): a microbatch is a piece of the batch in time,
and what is ``Partial()`` there adds up over the microbatches of a step. The gradient of a value has the placement of
the value on every axis that shards it, is whole where the value is a summand, and where the value is replicated it is
either whole or a summand: the set of axes where it is a summand is all there is to say of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.placement import Layout, Placement, local_shape
from autopar.passes.verify.terms import Term

TIME = 0
# Axes on which a gradient is a summand.
Summands = frozenset[int]
WHOLE: Summands = frozenset()


class Zigzag(NamedTuple):
    """A sequence in zigzag order in dimension ``dim``, with ``inner`` elements for each position.

    rows: the dimension with the rows of the documents in whose order each is; None if all are in one order.
    """

    dim: int
    inner: int
    rows: int | None = None


class Sequence(NamedTuple):
    """The sequence in zigzag order: its length, and the number of ranks that the order is for.

    documents: (B, S) or (1, S), if each row is in the order of its documents.
    """

    length: int
    num_ranks: int
    documents: Term | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows that have an order each."""
        return 1 if self.documents is None or self.documents.shape is None else self.documents.shape[0]


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a local value: ``scale`` times the piece of ``term`` in ``layout``, sequences in ``zigzag`` order.

    scale: the number of microbatches for a mean over one of them that is still to be divided by it, else 1.
    """

    term: Term
    layout: Layout
    zigzag: tuple[Zigzag, ...] = ()
    scale: int = 1

    def on(self, axis: int, placement: Placement) -> Type:
        """The type with another placement on one axis."""
        return replace(self, layout=(*self.layout[:axis], placement, *self.layout[axis + 1 :]))

    def shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Local shape on ``mesh``, which has the microbatch in front."""
        assert self.term.shape is not None
        return local_shape(self.term.shape, self.layout, mesh)

    def show(self, mesh: Mesh) -> str:
        """``x: Shard(0) on dp`` for messages."""
        places = [
            f"{spell(placement)} on {name}"
            for name, placement in zip(mesh.names, self.layout, strict=True)
            if not placement.is_replicate()
        ]
        text = f"{self.term}: {', '.join(places) or 'Replicate() on every axis'}"
        if self.zigzag:
            text += ", in zigzag order along " + " and ".join(str(order.dim) for order in self.zigzag)
        return text + (f", times {self.scale}" if self.scale != 1 else "")


def spell(placement: Placement) -> str:
    """``Shard(0)``, as in PyTorch."""
    return f"Shard({placement.dim})" if placement.is_shard() else str(type(placement).__name__) + "()"  # type: ignore[attr-defined]


def timed(mesh: Mesh, num_microbatches: int) -> Mesh:
    """``mesh`` with the microbatches of a step as an axis in front."""
    return Mesh((MeshAxis("microbatch", num_microbatches), *mesh.axes))


class Mistyped(Exception):
    """An op of a program has no type. The message is one without the place."""
