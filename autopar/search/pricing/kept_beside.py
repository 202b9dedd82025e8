"""Tensors that two blocks in a row keep, and constants: on one stage they are there once.

Two blocks read the same tensor: a bias that all layers add to their scores, the encoder's result in a decoder. Both
keep it at every level; it is counted with the first of them. Or one makes what the next one reads: the result of an
activation, which the activation and the next product need in their backward. The first keeps it without
rematerialisation alone, the next one at every level; it is counted with the next one. Constants are masks, rotary
tables and whatever else depends on no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autopar.cost_model.memory.activations import BlockActivations
from autopar.cost_model.memory.saved_tensors import Saved, local_sizes
from autopar.ir.analysis.views import Storage, storage_of
from autopar.ir.graph import tensor_operands
from autopar.ir.placed.layouts import Layouts
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.arrivals import Transfer


class KeptBeside(NamedTuple):
    """Bytes of a microbatch, of a block. constants: that its backward reads. shared: of those and of what else it keeps
    at every level, what the block before it keeps too. passed: of what it keeps without rematerialisation, what the
    next block keeps as its input."""

    constants: float
    shared: float
    passed: float


def kept_beside(pricing: Pricing, layouts: Layouts, block: int) -> KeptBeside:
    """Of ``block``. Tensors are shared as they are made: what is redistributed for a block is the block's own."""
    given = layouts.assignments, pricing.mesh, pricing.parts
    own = _activations(pricing, block)
    constants = local_sizes(own.constants, *given)
    shared: dict[object, float] = {}
    if block:
        before = _activations(pricing, block - 1)
        also = local_sizes(before.constants, *given)
        shared.update((key, size) for key, size in constants.items() if key in also)
        for transfer, other in pricing.workload.arrivals[block].shared:
            if any(_kept(before, layouts, pricing.workload.transfers[other])):
                shared.update(_sizes(_kept(own, layouts, pricing.workload.transfers[transfer]), pricing, layouts))
    passed: dict[Storage, float] = {}
    if block + 1 < pricing.workload.num_blocks:
        after = _activations(pricing, block + 1)
        for number in pricing.workload.arrivals[block + 1].passed:
            transfer_on = pricing.workload.transfers[number]
            if any(_kept(after, layouts, transfer_on)):
                made = (t for t in own.saved if t.storage == transfer_on.tensor.storage)
                passed.update(_sizes(made, pricing, layouts))
    return KeptBeside(*(sum(sizes.values()) for sizes in (constants, shared, passed)))


def _sizes(tensors: Iterable[Saved], pricing: Pricing, layouts: Layouts) -> Iterator[tuple[Storage, float]]:
    given = pricing.mesh, pricing.parts
    return ((tensor.storage, tensor.local_bytes(layouts.assignments[tensor.node], *given)) for tensor in tensors)


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
