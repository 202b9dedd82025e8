"""Losses that a rank computes in chunks of tokens (``autopar.ir.lowered.chunked_loss``): what they hold, and when.

between forward and backward    the gradient of the linear layer's input, of its weight in float32
forward, at its end             the logits of a chunk, in float32, and once more to be summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torch import fx

from autopar.cost_model.memory.saved_tensors import Saved
from autopar.ir.building import shape_of
from autopar.ir.lowered import loss_chunks
from autopar.ir.lowered.loss_chunks import Pair
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice

# Bytes of a number in float32, and how often a chunk's logits are there at once.
_WIDE, _COPIES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """A loss that is computed in chunks, on one rank, for one microbatch.

    held_bytes: from its forward to its backward. working_bytes: of a chunk. summed_bytes: that pass through memory
    while gradients of weights are added up, chunk by chunk.
    """

    held_bytes: float
    working_bytes: float
    summed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkableLoss:
    """A pair of ops that are computed in chunks where a rank has many logits.

    logits: the result of the linear layer. read: the same, as the loss reads it. rules: of both ops. gradients: tensors
    whose gradients forward makes. weights: those of them that are parameters.
    """

    pair: Pair
    logits: Saved
    read: Saved
    rules: tuple[FactorRule, FactorRule]
    gradients: tuple[Saved, ...]
    weights: tuple[Saved, ...]

    @classmethod
    def of(
        cls,
        loss: fx.Node,
        entry: Callable[[fx.Node, fx.Node | None, int], Saved],
        rules: Callable[[fx.Node], FactorRule],
        operands: Sequence[fx.Node],
        flows: Callable[[fx.Node], bool],
    ) -> ChunkableLoss | None:
        """The pair that ``loss`` ends, if it may ever be in chunks. entry: (op, operand or None for a result, position)
        -> tensor. operands: of its linear layer. flows: whether a gradient flows through a tensor."""
        pair = loss_chunks.pair_of(loss)
        if pair is None or not flows(loss) or prod(shape_of(pair.linear)) <= loss_chunks.LIMIT:
            return None
        uses = [entry(pair.linear, tensor, p) for p, tensor in enumerate(operands) if flows(tensor)]
        return cls(
            pair=pair,
            logits=entry(pair.linear, None, 0),
            read=entry(loss, pair.linear, 0),
            rules=(rules(pair.linear), rules(loss)),
            gradients=tuple(uses),
            weights=tuple(use for use in uses if use.storage[0].op == "placeholder"),
        )

    def chunked(
        self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
    ) -> Chunked | None:
        """What the pair needs under ``assignments``; None if a rank's logits are few, or moved before they are read."""
        made, read = assignments[self.pair.linear], assignments[self.pair.loss]
        linear, loss = self.rules
        pieces = 1
        classes = set(linear.results[0][-1])
        for axis, before, after in zip(mesh.axes, made, read, strict=True):
            placement = linear.result(0, before)
            if placement.is_partial() or placement != loss.operand(0, after)[0]:
                return None
            pieces *= 1 if classes.isdisjoint(factors_of_choice(before)) else axis.size

        def elements(tensor: Saved) -> float:
            return tensor.local_bytes(made, mesh, num_microbatches) / tensor.itemsize

        own = shape_of(self.pair.linear)[-1] / pieces
        rows = elements(self.logits) / own
        at_once = loss_chunks.rows_at_once(rows, own)
        if at_once is None:
            return None
        wide = sum(elements(weight) * max(_WIDE, weight.itemsize) for weight in self.weights)
        narrow = sum(elements(weight) * weight.itemsize for weight in self.weights)
        inputs = sum(t.local_bytes(made, mesh, num_microbatches) for t in self.gradients if t not in self.weights)
        return Chunked(
            held_bytes=wide + inputs,
            working_bytes=_COPIES * max(_WIDE, self.logits.itemsize) * at_once * own + narrow,
            summed_bytes=ceil(rows / at_once) * (2 * wide + 2 * narrow),
        )


def chunks(
    losses: Iterable[ChunkableLoss], assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1
) -> dict[Pair, Chunked]:
    """Those of ``losses`` that are computed in chunks under ``assignments``, and what they need."""
    found = ((loss.pair, loss.chunked(assignments, mesh, num_microbatches)) for loss in losses)
    return {pair: chunked for pair, chunked in found if chunked is not None}
