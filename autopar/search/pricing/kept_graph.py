"""The forward of a block under an assignment, with bytes and seconds of one microbatch on one rank, and what it costs
to keep the sets that a plan has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autopar.cost_model.memory.kept_frontier import PICOSECONDS, PricedForward
from autopar.cost_model.memory.saved_tensors import Saved
from autopar.ir.analysis.forward_graph import BESIDE, INSIDE, ForwardBuilder, ForwardOp, Op, Tensor
from autopar.ir.analysis.views import storage_of
from autopar.ir.graph import source, tensor_operands, tensor_results
from autopar.ir.lowered.table import lowering_of
from autopar.ir.placed.layouts import Layouts
from autopar.ir.redistribution import reduces_or_all_to_alls
from autopar.ir.rule import Assignment
from autopar.search.pricing.pricing import Pricing


def kept_graph(pricing: Pricing, layouts: Layouts, kind: int) -> PricedForward:
    """Of the first block of a kind."""
    return _Builder(pricing, layouts, kind).priced()


class KeptCost(NamedTuple):
    """Of a set that a block keeps: bytes of a microbatch, seconds of what runs again, and bytes that wait in host
    memory, input_bytes of them inputs of the block."""

    num_bytes: float
    seconds: float
    host_bytes: float
    input_bytes: float


def kept_costs(
    pricing: Pricing, assignment: tuple[Assignment, ...], layouts: Layouts, kind: int
) -> Sequence[KeptCost | None]:
    """What it costs the first block of a kind to keep each set of ``pricing``; None of one that keeps everything."""
    known = pricing.moves.evaluated.setdefault("kept", {})
    listed = tuple((sets.listed[kind], sets.host[kind]) for sets in pricing.kept)
    key = (kind, listed, pricing.parts, *gathers_key(pricing), assignment)
    if key not in known:
        forward = kept_graph(pricing, layouts, kind)
        known[key] = [None if own is None else _cost(forward, own, host) for own, host in listed]
    found: Sequence[KeptCost | None] = known[key]
    return found


def _cost(forward: PricedForward, listed: tuple[str, ...], host: tuple[str, ...]) -> KeptCost:
    kept = forward.keeping(forward.graph.named(listed))
    return KeptCost(kept.num_bytes, kept.seconds, *forward.on_host(kept, host))


def gathers_key(pricing: Pricing) -> tuple[object, ...]:
    """What prices of ops depend on beside their assignment: products have less to cast where ZeRO gathers their weights
    in 8 bits."""
    if not pricing.workload.narrow_products:
        return ()
    return pricing.zero, pricing.data_axes, pricing.zero_stages, pricing.offload


class _Builder(ForwardBuilder):
    def __init__(self, pricing: Pricing, layouts: Layouts, kind: int) -> None:
        workload = pricing.workload
        self._block = next(block for block in workload.repetition.blocks if block.kind == kind)
        self._activations = workload.kept(pricing.memory).blocks[kind]
        self._chunks = self._activations.chunks(layouts.assignments, pricing.mesh, pricing.parts)
        super().__init__(
            workload.repetition.key,
            differentiable=workload.analysis.differentiable,
            free=frozenset(workload.repetition.prelude),
            once={node for pair in self._chunks for node in pair},
        )
        self._pricing, self._layouts = pricing, layouts
        transfers = [workload.transfers[number] for number in workload.arrivals[self._block.index].transfers]
        self._transfer_of = {use: transfer for transfer in transfers for use in transfer.uses}
        self._num_bytes: dict[Tensor, float] = {}
        self._seconds: dict[Op, float] = {}

    def priced(self) -> PricedForward:
        graph = self.graph(node for node in self._block.nodes if node in self._layouts.assignments)
        for name, op in graph.ops.items():
            if not (op.once or name in self._seconds):
                self._price(name, op)
            self._num_bytes.update((made, 0.0) for made in op.makes if made not in self._num_bytes)
        for pair, chunked in self._chunks.items():
            self._num_bytes[pair] = chunked.held_bytes
        return PricedForward(
            graph=replace(graph, outside=graph.outside.union(self._chunks), needed=graph.needed.union(self._chunks)),
            num_bytes={tensor: round(num_bytes) for tensor, num_bytes in self._num_bytes.items()},
            picoseconds={name: round(seconds * PICOSECONDS) for name, seconds in self._seconds.items()},
            inputs=graph.outside,
        )

    def is_lowered(self, node: fx.Node) -> bool:
        return lowering_of(self._pricing.workload.rule(node), self._layouts.assignments[node]) is not None

    def arriving(self, node: fx.Node, position: int) -> Tensor:
        """As it is made, or reduced or moved all to all, which the block does that makes it."""
        found = storage_of(tensor_operands(node)[position])
        transfer = self._transfer_of.get((node, position))
        if transfer is None:
            self._num_bytes[found] = 0.0  # of no block
            return found
        made = self._layouts.made(transfer.tensor.node, transfer.tensor.result)
        need = self._layouts.need_of(transfer.tensor.node, node, position)
        come = need.value if reduces_or_all_to_alls(made, *need) else made
        self._num_bytes[found] = self._pricing.local_bytes(transfer.tensor, come)
        return found

    def redistributed(self, node: fx.Node, position: int, made: Tensor) -> Tensor:
        transfer = self._transfer_of.get((node, position))
        if transfer is None:
            return made
        layout = self._layouts.made(transfer.tensor.node, transfer.tensor.result)
        need = self._layouts.need_of(transfer.tensor.node, node, position)
        if need.value == layout or (made in self.outside and reduces_or_all_to_alls(layout, *need)):
            return made
        moved = (*source(tensor_operands(node)[position]), need.value)
        if moved not in self.ops:
            self._num_bytes[moved] = self._pricing.local_bytes(transfer.tensor, need.value)
            self._seconds[moved] = self._pricing.move(transfer, layout, *need).forward_s
            self.ops[moved] = ForwardOp(reads=frozenset([made]), makes=frozenset([moved]))
        return moved

    def _price(self, name: Op, op: ForwardOp) -> None:
        """Seconds of an op of the block, and bytes of what it makes."""
        pricing, workload = self._pricing, self._pricing.workload
        if isinstance(name, fx.Node):
            node = name
            for number in range(len(tensor_results(node))):
                tensor, layout = workload.tensor(node, number), self._layouts.made(node, number)
                self._num_bytes[node, number] = pricing.local_bytes(tensor, layout)
            beside, copied = (self._bytes(node, own) for own in (self._activations.extra, self._activations.copied))
            self._num_bytes[node, BESIDE] = beside - copied
        else:
            assert isinstance(name, tuple)
            node = name[0]
            self._num_bytes[node, INSIDE] = self._bytes(node, self._products(node))
        forward = pricing.op(node, self._layouts.assignments[node]).forward_s
        if name is not node or (node, INSIDE) in op.reads:
            beside = pricing.ops.cost(node).beside_products_s(
                self._layouts.assignments[node], pricing.mesh, pricing.parts
            )
            forward = beside if name is node else max(0.0, forward - beside)
        self._seconds[name] = forward

    def _products(self, node: fx.Node) -> Iterator[Saved]:
        """Results of products and of all-to-alls inside an op."""
        choices = frozenset(self._layouts.assignments[node])
        yield from self._activations.kept
        yield from (one for one, dispatching in self._activations.dispatched if not dispatching.isdisjoint(choices))

    def _bytes(self, node: fx.Node, tensors: Iterator[Saved] | tuple[Saved, ...]) -> float:
        given = self._layouts.assignments[node], self._pricing.mesh, self._pricing.parts
        return sum(one.local_bytes(*given) for one in tensors if one.node is node)
