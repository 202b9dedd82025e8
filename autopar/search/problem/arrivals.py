"""The tensors that come into the blocks of a model, each with its uses; equal blocks have equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.views import Storage, is_view, storage_of


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

    @property
    def storage(self) -> Storage:
        """The tensor whose memory it uses."""
        return storage_of(self.node) if is_view(self.node) else (self.node, self.result)

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


class Shared(NamedTuple):
    """A transfer into a block of a tensor of an earlier one, which the block right before it reads too. transfer,
    before: numbers of the transfers into the two blocks."""

    transfer: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Relations of equal blocks to others.

    transfers: numbers of the transfers into such a block. crossing: tensors that cross a cut before it. shared: those
    of the transfers that the block right before it has as well. passed: those of what that block makes.
    """

    transfers: tuple[int, ...]
    crossing: tuple[Tensor, ...]
    shared: tuple[Shared, ...]
    passed: tuple[int, ...]


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
    shared: dict[int, list[Shared]] = {}
    passed: dict[int, list[int]] = {}
    for (_, _, start), readings in readers.items():
        for block, number in readings.items():
            if PRELUDE < start == block - 1:
                passed.setdefault(block, []).append(number)
            elif PRELUDE < start < block and block - 1 in readings:
                shared.setdefault(block, []).append(Shared(number, readings[block - 1]))
    made: dict[tuple[object, ...], Arrivals] = {}
    found = {}
    for block in (PRELUDE, *range(num_blocks)):
        own = Arrivals(
            transfers=tuple(into.get(block, ())),
            crossing=tuple(over.get(block, ())),
            shared=tuple(shared.get(block, ())),
            passed=tuple(passed.get(block, ())),
        )
        crossing = tuple((tensor.node, tensor.result) for tensor in own.crossing)
        found[block] = made.setdefault((own.transfers, crossing, own.shared, own.passed), own)
    return found
