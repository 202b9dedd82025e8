"""The tensors that come into the blocks of a model, each with its uses; equal blocks have equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor by its (representative) producer: an op, a step input, a buffer or a constant.

    numel, rows: elements and size of dimension 0, of the whole batch. itemsize: bytes of an element in compute.
    carries_batch: a microbatch has a part of it, of its rows if ``by_rows``. differentiable: a gradient flows
    through it.
    """

    node: fx.Node
    result: int
    numel: int
    rows: int
    itemsize: int
    carries_batch: bool
    by_rows: bool
    differentiable: bool
    floating: bool

    def bytes_of_microbatch(self, num_microbatches: int) -> float:
        """Bytes of one microbatch of the global tensor."""
        return self.numel * self.itemsize / (num_microbatches if self.carries_batch else 1)

    def rows_of_microbatch(self, num_microbatches: int) -> float:
        """Size of dimension 0 of one microbatch of the global tensor."""
        return self.rows / (num_microbatches if self.carries_batch and self.by_rows else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A tensor and its uses inside one block.

    uses: (representative op, operand position). blocks: index of every block instance it looks like this in.
    from_blocks: block of the producer, for each of ``blocks`` (PRELUDE for step inputs and the prelude). narrow:
    whether products by tensor alone read it, and whether one alone reads its gradient (``narrow_activations``).
    """

    tensor: Tensor
    uses: tuple[tuple[fx.Node, int], ...]
    blocks: tuple[int, ...]
    from_blocks: tuple[int, ...]
    narrow: tuple[bool, bool] = (False, False)


class Again(NamedTuple):
    """A transfer into a block of a tensor that the block before it has too. transfer: its number. before: the number
    of the transfer of the tensor into the block before, if there is one. is_made: whether that block makes it."""

    transfer: int
    before: int | None
    is_made: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Relations of equal blocks to others.

    transfers: numbers of the transfers into such a block. crossing: tensors that cross a cut before it. again: those
    that the block before it has too.
    """

    transfers: tuple[int, ...]
    crossing: tuple[Tensor, ...]
    again: tuple[Again, ...]


def arrivals_of(transfers: Sequence[Transfer], num_blocks: int) -> Mapping[int, Arrivals]:
    """Arrivals of every block and of the PRELUDE; one object for equal blocks."""
    into: dict[int, list[int]] = {}
    readers: dict[tuple[fx.Node, int, int], dict[int, int]] = {}
    reach: dict[tuple[fx.Node, int, int], tuple[Tensor, int]] = {}
    for number, transfer in enumerate(transfers):
        tensor = transfer.tensor
        for block, start in zip(transfer.blocks, transfer.from_blocks, strict=True):
            into.setdefault(block, []).append(number)
            readers.setdefault((tensor.node, tensor.result, start), {})[block] = number
            if start != PRELUDE and block > start:
                key = (tensor.node, tensor.result, start)
                reach[key] = (tensor, max(block, reach[key][1] if key in reach else block))
    over: dict[int, list[Tensor]] = {}
    for (_, _, start), (tensor, end) in reach.items():
        for block in range(start + 1, end + 1):
            over.setdefault(block, []).append(tensor)
    twice: dict[int, list[Again]] = {}
    for (_, _, start), readings in readers.items():
        for block, number in readings.items():
            if PRELUDE < start < block and (start == block - 1 or block - 1 in readings):
                again = Again(number, readings.get(block - 1), start == block - 1)
                twice.setdefault(block, []).append(again)
    made: dict[tuple[object, ...], Arrivals] = {}
    found = {}
    for block in (PRELUDE, *range(num_blocks)):
        arriving = tuple(into.get(block, ())), tuple(over.get(block, ())), tuple(twice.get(block, ()))
        alike = (arriving[0], tuple((tensor.node, tensor.result) for tensor in arriving[1]), arriving[2])
        own = Arrivals(transfers=arriving[0], crossing=arriving[1], again=arriving[2])
        found[block] = made.setdefault(alike, own)
    return found
