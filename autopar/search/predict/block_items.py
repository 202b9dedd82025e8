"""Items of a block's passes, in seconds: its ops, and the collectives on its compute stream.

    forward     forward of the ops; redistributions of what they read; work on the parameters
    inputs      of the backward, gradients of what the ops read; redistributions of gradients
    weights     of the backward, gradients of the parameters

The items of a block add up to its ``BlockPrice``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_model.communication.gradient_sync import SyncTime
from autopar.cost_model.compute.op_time import ZERO
from autopar.ir.analysis.op_stream import op_name
from autopar.ir.placed.layouts import Layouts
from autopar.ir.rule import Assignment
from autopar.search.predict.communications import Communication, inside_op, name_of, of_transfer
from autopar.search.pricing.block_moves import layouts_of, needs_of
from autopar.search.pricing.block_prices import Priced
from autopar.search.pricing.pricing import Pricing


class Item(NamedTuple):
    """Something that takes time. kind: ``op``, ``collective``, ``send``, ..; name: ``linear``, ``all_gather``; of:
    ``BLOCK/OP``, a tensor by the op that makes it, or a kind of block; axis: of the mesh, for a collective."""

    kind: str
    name: str
    of: str
    axis: str = ""


class Seconds(NamedTuple):
    """Seconds of one microbatch of a block on one rank, by part of a pass."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockItems:
    """The items of every block of a plan."""

    pricing: Pricing
    priced: Priced
    layouts: Layouts

    @classmethod
    def of(cls, pricing: Pricing, assignment: tuple[Assignment, ...], priced: Priced) -> BlockItems:
        """priced: ``evaluate`` of ``assignment`` with ``pricing``."""
        return cls(pricing=pricing, priced=priced, layouts=layouts_of(pricing.workload, assignment))

    def kind_of(self, block: int) -> str:
        """Name of a block's kind, as in the plan."""
        repetition = self.pricing.workload.repetition
        return repetition.kinds[repetition.blocks[block].kind].name

    def items(self, block: int) -> Iterator[tuple[Item, Seconds]]:
        """Items of the passes of a block without recomputation and ZeRO's collectives. An item may be repeated."""
        pricing, workload = self.pricing, self.pricing.workload
        for node in map(workload.representative, workload.repetition.blocks[block].nodes):
            if node not in self.layouts.assignments:
                continue
            choices = self.layouts.assignments[node]
            own = pricing.op(node, choices) + -1.0 * pricing.lowering(node, choices)
            share = pricing.delayed_share(node)
            seconds = Seconds(own.forward_s, (1.0 - share) * own.backward_s, share * own.backward_s)
            yield Item("op", op_name(node), name_of(workload, node)), seconds
            yield from _collectives(inside_op(pricing, node, choices))
        for number in workload.arrivals[block].transfers:
            transfer = workload.transfers[number]
            source = self.layouts.made(transfer.tensor.node, transfer.tensor.result)
            yield from _collectives(of_transfer(pricing, transfer, source, needs_of(self.layouts, transfer)))
        micro = sum((price.micro for price in self.priced.held.get(block, ())), ZERO)
        yield (
            Item("parameters", "casts and copies", self.kind_of(block)),
            Seconds(forward=micro.forward_s, weights=micro.backward_s),
        )

    def gather(self, block: int) -> Item:
        """The collective that brings a block its parameters, under ZeRO."""
        axes = {axis for price in self.priced.held.get(block, ()) for axis in price.zero_axes}
        return Item("collective", "all_gather", f"parameters of {self.kind_of(block)}", self._names(axes))

    def reduce(self, block: int) -> Item:
        """The collectives that sum the gradients of a block's parameters."""
        held = self.priced.held.get(block, ())
        sharded = {axis for price in held if price.requires_grad for axis in price.zero_axes}
        whole = {axis for price in held for axis in price.sync_axes}
        names = [name for name, axes in (("reduce_scatter", sharded), ("all_reduce", whole)) if axes]
        return Item("collective", ", ".join(names), f"gradients of {self.kind_of(block)}", self._names(sharded | whole))

    def copies(self, block: int) -> Item:
        """What the core that computes copies for the all-reduces of a block's gradients, on a CPU."""
        axes = {axis for price in self.priced.held.get(block, ()) for axis in price.sync_axes}
        return Item("collective", "copies", f"gradients of {self.kind_of(block)}", self._names(axes))

    def copied(self, block: int) -> SyncTime:
        """Seconds of ``copies``."""
        return self.pricing.summed_sync(self.priced.held.get(block, ())).waited

    def _names(self, axes: Iterable[int]) -> str:
        return ", ".join(self.pricing.mesh.names[axis] for axis in sorted(axes))


def _collectives(found: Iterable[Communication]) -> Iterator[tuple[Item, Seconds]]:
    for one in found:
        yield _moved(one.forward, one), Seconds(forward=one.time.forward_s)
        yield _moved(one.backward, one), Seconds(inputs=one.time.backward_s)


def _moved(collective: str, one: Communication) -> Item:
    """Of one direction of a step, which may be a copy of a slice alone."""
    return Item("collective" if collective else "copy", collective or "slice", one.tensor, one.axis)
