"""Tensors that a block keeps and the block before it keeps as well, so that on one stage they are there once.

A bias that all layers add to their scores, the encoder's result in every layer of a decoder, the result of an
activation at the end of a block, which the activation and the next product both read in their backward; and masks,
rotary tables and whatever else depends on no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from autopar.cost_model.memory.activations import BlockActivations
from autopar.cost_model.memory.saved_tensors import Saved, local_sizes
from autopar.ir.analysis.views import Storage, is_view, storage_of
from autopar.ir.graph import tensor_operands
from autopar.ir.placed.layouts import Layouts
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.arrivals import Again, Tensor, Transfer


class KeptBeside(NamedTuple):
    """Bytes of a microbatch. constants: of what depends on no parameter and the backward of a block reads. shared: of
    that and of what else the block keeps at every level, what the block before it keeps too."""

    constants: float
    shared: float


def kept_beside(pricing: Pricing, layouts: Layouts, block: int) -> KeptBeside:
    """Of ``block``. A tensor is shared as it is made: what is redistributed for a block is the block's own."""
    workload, given = pricing.workload, (layouts.assignments, pricing.mesh, pricing.parts)
    own = _activations(pricing, block)
    constants = local_sizes(own.constants, *given)
    if not block:
        return KeptBeside(sum(constants.values()), 0.0)
    before = _activations(pricing, block - 1)
    also = local_sizes(before.constants, *given)
    shared: dict[object, float] = {key: size for key, size in constants.items() if key in also}
    for again in workload.arrivals[block].again:
        transfer = workload.transfers[again.transfer]
        for saved in _kept(own, layouts, transfer):
            if _is_kept(before, layouts, again, transfer.tensor, pricing):
                shared[saved.storage] = saved.local_bytes(layouts.assignments[saved.node], *given[1:])
    return KeptBeside(sum(constants.values()), sum(shared.values()))


def _activations(pricing: Pricing, block: int) -> BlockActivations:
    kind = pricing.workload.repetition.blocks[block].kind
    return pricing.workload.kept(pricing.memory).blocks[kind]


def _kept(activations: BlockActivations, layouts: Layouts, transfer: Transfer) -> Iterator[Saved]:
    """What ops keep of a transfer that comes to them as it is made."""
    made = layouts.made(transfer.tensor.node, transfer.tensor.result)
    for node, position in transfer.uses:
        if layouts.need_of(transfer.tensor.node, node, position).value == made:
            storage = storage_of(tensor_operands(node)[position])
            yield from (t for t in activations.saved if t.node is node and t.storage == storage)


def _is_kept(before: BlockActivations, layouts: Layouts, again: Again, tensor: Tensor, pricing: Pricing) -> bool:
    if again.before is not None and any(_kept(before, layouts, pricing.workload.transfers[again.before])):
        return True
    return again.is_made and any(t.node is tensor.node and t.storage == _base(tensor) for t in before.saved)


def _base(tensor: Tensor) -> Storage:
    node: fx.Node = tensor.node
    return storage_of(node) if is_view(node) else (node, tensor.result)
