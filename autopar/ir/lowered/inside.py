"""The collectives inside a lowered op: what the op's shards exchange, which no redistribution shows.

cross_entropy over classes on tp    all_gather on tp of two float32 a token, forward

Each lowering with some says so beside its code, in a function ``inside`` (``ir.lowered.table``); prices and the records
of a placed model read that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, TensorFactors, factors_of_choice

Phase = Literal["forward", "backward"]


class Inside(NamedTuple):
    """One collective inside a lowered op.

    kind: ``all_gather``, ``send`` and so on, as counted when it runs. axes: of the mesh, one group over all of them.
    payload_bytes: of one microbatch on one rank, of the tensor before a scatter or after a gather. dispatch: part of
    the dispatch of tokens to experts, which decide its size; ``payload_bytes`` is the mean over the ranks. once: no
    recomputation runs it again.
    """

    kind: str
    phase: Phase
    axes: tuple[str, ...]
    payload_bytes: float
    dispatch: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSizes:
    """Sizes of what one rank has of an op in one microbatch.

    itemsize: bytes of an element of compute, by dtype. batch: the factor that microbatches divide. zigzag_ranks: that
    share a sequence in zigzag order, 1 in natural order. by_documents: it is in the order of packed documents. flows:
    whether a gradient goes to an operand, by position. gathered: whether ranks have gathered an operand in 8 bits, by a
    scale for all of it; gathers_gradient: or the gradient of the result.
    """

    assignment: Assignment
    mesh: Mesh
    itemsize: Callable[[torch.dtype], int]
    batch: str | None = None
    num_microbatches: int = 1
    zigzag_ranks: int = 1
    by_documents: bool = False
    flows: Callable[[int], bool] = lambda position: True
    gathered: Callable[[int], bool] = lambda position: False
    gathers_gradient: bool = False

    def share(self, factors: TensorFactors) -> float:
        """The part of a tensor with ``factors`` that one rank has in one microbatch."""
        names = {factor for dim in factors for factor in dim}
        pieces = prod(
            axis.size
            for choice, axis in zip(self.assignment, self.mesh.axes, strict=True)
            if not names.isdisjoint(factors_of_choice(choice))
        )
        return 1.0 / pieces / (self.num_microbatches if self.batch in names else 1)

    def size(self, axis: str) -> int:
        """Number of ranks along a mesh axis."""
        return self.mesh.axes[self.mesh.index(axis)].size
