"""Storages of a block's tensors, and their bytes on one rank.

Views share the storage of what they view, so a storage is counted once however many ops save it, but once for every
way it is cut: an operand that a redistribution gathered is another tensor than the shard it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import fx

from autopar.ir.analysis.views import Storage
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, TensorFactors, factors_of_choice


def names_of(tensors: Iterable[TensorFactors]) -> frozenset[str]:
    """All factors of these tensors."""
    return frozenset(factor for tensor in tensors for dim in tensor for factor in dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of ``node`` that may be kept: bytes of the whole batch over all ranks, and the factors it runs over.

    itemsize: of an element, where it matters.
    """

    node: fx.Node
    storage: Storage
    num_bytes: float
    factors: frozenset[str]
    carries_batch: bool
    itemsize: int = 1

    @classmethod
    def of(
        cls,
        node: fx.Node,
        storage: Storage,
        num_bytes: float,
        tensors: Sequence[TensorFactors],
        batch_factor: str | None,
        itemsize: int = 1,
    ) -> Saved:
        """tensors: factors of each dimension, of every tensor that it is cut like."""
        names = names_of(tensors)
        return cls(
            node=node,
            storage=storage,
            num_bytes=float(num_bytes),
            factors=names,
            carries_batch=batch_factor is not None and batch_factor in names,
            itemsize=itemsize,
        )

    def cuts(self, assignment: Assignment) -> tuple[bool, ...]:
        """Mesh axes that shard the tensor."""
        return tuple(not self.factors.isdisjoint(factors_of_choice(choice)) for choice in assignment)

    def local_bytes(self, assignment: Assignment, mesh: Mesh, num_microbatches: int = 1) -> float:
        """Bytes of it on one rank for one microbatch."""
        local = self.num_bytes / (num_microbatches if self.carries_batch else 1)
        for cut, axis in zip(self.cuts(assignment), mesh.axes, strict=True):
            if cut:
                local /= axis.size
        return local


def local_sizes(
    tensors: Iterable[Saved], assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int
) -> dict[tuple[Storage, tuple[bool, ...]], float]:
    """Bytes that one rank holds of each distinct storage among ``tensors``, by the way it is cut."""
    sizes: dict[tuple[Storage, tuple[bool, ...]], float] = {}
    for tensor in tensors:
        assignment = assignments[tensor.node]
        local = tensor.local_bytes(assignment, mesh, num_microbatches)
        key = tensor.storage, tensor.cuts(assignment)
        sizes[key] = min(sizes.get(key, inf), local)
    return sizes
