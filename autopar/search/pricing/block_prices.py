"""Prices of an assignment, block by block: the input of stage cuts and of the prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from autopar.cost_model.communication.gradient_sync import branch_s, exposed_time
from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.compute.recomputation import bookkeeping_time, rematerialised_s
from autopar.cost_model.memory.backward_peak import BackwardPeak
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.views import is_view
from autopar.ir.graph import is_getitem
from autopar.ir.placed.layouts import Layouts
from autopar.ir.placed.storage import Storage, find_data_axes, stored
from autopar.ir.rematerialisation import LEVELS
from autopar.ir.rule import Assignment
from autopar.search.pricing.block_moves import Moves, crossing_bytes, layouts_of, moved_by
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.host_link import link_taken
from autopar.search.pricing.kept_beside import kept_beside
from autopar.search.pricing.kept_graph import gathers_key, kept_costs
from autopar.search.pricing.parameter_price import ParameterPrice
from autopar.search.pricing.pricing import Pricing
from autopar.search.stages.stage import FULL, BlockCost, Stage

T = TypeVar("T")


def exposed_sync(blocks: Sequence[BlockPrice], prefetch: int = 1) -> tuple[float, float]:
    """Seconds that ZeRO adds to forward and backward of one microbatch, as far as compute does not hide them.

    A gather issued ``prefetch`` blocks ahead hides behind that many blocks together.
    """
    forward = backward = 0.0
    for start in range(0, len(blocks), prefetch):
        first, *others = blocks[start : start + prefetch]
        sync, computed = sum((b.sync for b in others), first.sync), sum((b.compute for b in others), first.compute)
        beside, lost, waited = sync.beside, sync.lost, sync.waited
        forward += exposed_time(beside.forward_s, computed.forward_s, lost.forward_s) + waited.forward_s
        backward += exposed_time(beside.backward_s, computed.backward_s, lost.backward_s) + waited.backward_s
    return forward, backward


def exposed_step_sync(blocks: Sequence[BlockPrice]) -> tuple[float, float]:
    """Seconds that gathers of once a step add to the first forward, and gradient reductions to the step, as far as the
    first forward and the last backward do not hide them."""
    reductions, lost, waited = reductions_of_step(blocks)
    last = exposed_time(reductions, sum(b.compute.backward_s for b in blocks), lost)
    return exposed_gathers_of_step(blocks), last + waited


def exposed_gathers_of_step(blocks: Sequence[BlockPrice], forwards: int = 1) -> float:
    """Seconds that gathers of once a step add, beside so many forwards of ``blocks``."""
    computed = forwards * sum(b.compute.forward_s for b in blocks)
    beside, lost = sum(b.sync.beside.first_s for b in blocks), sum(b.sync.lost.first_s for b in blocks)
    return exposed_time(beside, computed, lost) + sum(b.sync.waited.first_s for b in blocks)


def reductions_of_step(blocks: Sequence[BlockPrice]) -> tuple[float, float, float]:
    """Seconds of gradient reductions of once a step: beside compute, what that loses by them, and of those that compute
    waits for."""
    every = ((b.sync.beside, b.sync.lost, b.sync.waited) for b in blocks)
    beside, lost, waited = (sum(own.step_s - own.first_s for own in part) for part in zip(*every, strict=True))
    return beside, lost, waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """All blocks under one assignment. parameters, storage: by placeholder name. held: the parameters of each block.

    prelude_s: of one microbatch on every stage, the transfer of its step inputs to the device included.
    """

    blocks: tuple[BlockPrice, ...]
    prelude_s: float
    parameters: Mapping[str, ParameterPrice]
    storage: Mapping[str, Storage]
    held: Mapping[int, tuple[ParameterPrice, ...]]

    def block_costs(self, pricing: Pricing, num_stages: int) -> tuple[BlockCost, ...]:
        """Costs for ``stage_cuts.cut``: those of once a step are spread over the microbatches."""
        cluster = pricing.ops.cluster
        link = cluster.stage_link(pricing.mesh, num_stages) if num_stages > 1 else None
        count, reserved = pricing.num_microbatches, 1 + pricing.memory.fragmentation
        known: dict[int, BlockCost] = {}
        costs = []
        for number, block in enumerate(self.blocks):
            known_cost = known.get(id(block)) if number > 1 else None
            if known_cost is not None:
                costs.append(known_cost)
                continue
            first, last = exposed_step_sync([block])
            once = first + last + block.optimiser_s
            send = 0.0
            if link is not None and number > 0:
                send = block.send_s(link) + block.return_s(link)
            plain, levels = sum(exposed_sync([block])) + once / count, range(len(block.saved_bytes))
            made = BlockCost(
                time_s=tuple(plain + block.forward_s(level) + block.backward_s(level) for level in levels),
                saved_bytes=tuple(num_bytes * reserved for num_bytes in block.saved_bytes),
                fetched_bytes=tuple(own.num_bytes * reserved for own in block.host),
                delayed_bytes=block.delayed_bytes * reserved,
                static_bytes=block.states.total,
                workspace_bytes=(working := block.working_bytes(pricing.prefetch)),
                tiled_bytes=block.unmade_bytes + working - block.working_bytes(pricing.prefetch, FULL),
                send_s=send,
                once_s=once / count,
                first_s=first / count,
            )
            if number:
                known[id(block)] = made
            costs.append(made)
        return tuple(costs)


def evaluate(pricing: Pricing, assignment: tuple[Assignment, ...], *, shared_once: bool) -> Priced:
    """Price every block when op cluster ``c`` has assignment ``assignment[c]``.

    shared_once: a parameter that several blocks use is held by the first of them (there is one stage); else by each of
    them, as if on stages of their own.
    """
    workload = pricing.workload
    layouts = layouts_of(workload, assignment)
    assignments, inputs = layouts.assignments, layouts.inputs

    # Costs that do not depend on ZeRO are shared by all of its stages (``_known``).
    def ops(kind: int) -> _Ops:
        return _Ops.of(pricing, assignments, kind)

    def move(number: int) -> Moves:
        return moved_by(pricing, workload.transfers[number], layouts)

    own = _known(pricing, assignment, "ops", workload.clusters_of_kinds, ops)
    moves = _known(pricing, assignment, "moves", workload.clusters_of_transfers, move)
    prices, storage, by_block = _parameters(pricing, layouts, shared_once)
    made: dict[tuple[object, ...], BlockPrice] = {}
    blocks = []
    for block in workload.repetition.blocks:
        arrivals, held = workload.arrivals[block.index], by_block.get(block.index, ())
        around = id(arrivals), id(workload.arrivals.get(block.index + 1))
        key = (block.kind, *around, *(id(price) for price in held))
        if key not in made:
            reaches = workload.kept(pricing.memory).blocks[block.kind]
            past = [n for n in arrivals.transfers if reaches.is_past(node for node, _ in workload.transfers[n].uses)]
            moved, left = (sum((moves[n] for n in numbers), Moves()) for numbers in (arrivals.transfers, past))
            crossing = crossing_bytes(pricing, arrivals.crossing, layouts)
            price = own[block.kind].block(pricing, moved, left, held, crossing)
            beside = kept_beside(pricing, layouts, block.index)
            price = price.passing(beside.passed)
            costs = kept_costs(pricing, assignment, layouts, block.kind) if pricing.kept else ()
            price = price.keeping(costs, pricing.ops.cluster.device, link_taken(pricing, held)) if costs else price
            made[key] = price.beside(beside.constants, beside.shared)
        blocks.append(made[key])
    if workload.unread_bytes:
        # Parameters that no op reads are there all the time, on the first stage.
        unread = MemoryParts(parameters=workload.unread_bytes)
        first = blocks[0]
        blocks[0] = replace(first, states=first.states + unread, resting=first.resting + unread)
    prelude = pricing.feeding_s(inputs)
    prelude += sum(pricing.op(n, assignments[n]).forward_s for n in workload.clusters.inputs.members)
    prelude += sum(moves[number].all.forward_s for number in workload.arrivals[PRELUDE].transfers)
    return Priced(blocks=tuple(blocks), prelude_s=prelude, parameters=prices, storage=storage, held=by_block)


def _known(
    pricing: Pricing,
    assignment: tuple[Assignment, ...],
    what: str,
    clusters: Sequence[tuple[int, ...]],
    make: Callable[[int], T],
) -> list[T]:
    """``make`` of every number, computed once for equal assignments of the clusters that it depends on."""
    known: dict[object, T] = pricing.moves.evaluated.setdefault(what, {})
    gathers = gathers_key(pricing)
    found = []
    for number, own in enumerate(clusters):
        key = (number, pricing.parts, *gathers, *(assignment[index] for index in own))
        if key not in known:
            known[key] = make(number)
        found.append(known[key])
    return found


def evaluate_stages(pricing: Pricing, assignment: tuple[Assignment, ...], stages: Sequence[Stage]) -> Priced:
    """Price every block for where it is offloaded to."""
    places = [stage.place(block) for stage in stages for block in range(stage.first, stage.last + 1)]
    made = {
        offload: evaluate(replace(pricing, offload=offload), assignment, shared_once=len(stages) == 1)
        for offload in set(places)
    }
    blocks = [made[place].blocks[block] for block, place in enumerate(places)]
    return replace(made[places[0]], blocks=tuple(blocks))


def data_axes_of(priced: Priced, inputs: Assignment) -> tuple[int, ...]:
    """Data axes of a priced assignment; see ``find_data_axes``. inputs: choices of the step inputs."""
    return find_data_axes(priced.storage.values(), inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ops:
    """Costs that all blocks of a kind have in common.

    unreached_s: forward seconds of ops that recomputation does not reach; unreached_dear_s: the part of them in
    contractions and collectives. bookkeeping: what recomputation of anything takes besides. tiled_s: what full
    rematerialisation takes longer for computing wide layers in tiles.
    """

    compute: OpTime
    inside: OpTime
    contraction_s: float
    recomputed_s: float
    unreached_s: float
    unreached_dear_s: float
    bookkeeping: OpTime
    weights_s: float
    twice_s: float
    delayed_bytes: float
    saved: tuple[float, ...]
    unmade_bytes: float
    tiled_s: float
    peak: BackwardPeak
    tiled_peak: BackwardPeak

    @classmethod
    def of(cls, pricing: Pricing, assignments: Mapping[fx.Node, Assignment], kind: int) -> _Ops:
        workload = pricing.workload
        first = next(block for block in workload.repetition.blocks if block.kind == kind)
        compute = inside = ZERO
        contraction = weights = twice = later = unreached = unreached_dear = 0.0
        memory = pricing.memory
        activations = workload.kept(memory).blocks[kind]
        delayed: set[fx.Node] = set()
        chunks = activations.chunks(assignments, pricing.mesh, pricing.parts)
        unrepeated = activations.unreached.union(*chunks)
        for chunked in chunks.values():
            compute += OpTime(pricing.ops.cluster.device.memory_seconds(chunked.summed_bytes))
        num_ops = 0.0
        for node in first.nodes:
            if node not in assignments:
                continue
            if not (is_view(node) or is_getitem(node)):
                num_ops += 1 + pricing.ops.cost(node).kernels_of_experts(assignments[node], pricing.mesh)
            total = pricing.op(node, assignments[node])
            lowered = pricing.lowering(node, assignments[node])
            compute += total + -1.0 * lowered
            inside += lowered
            contracts = is_contraction(node, workload.rule(node))
            dear = lowered.forward_s
            if contracts:
                cost = pricing.ops.cost(node)
                dear = total.forward_s - cost.beside_products_s(assignments[node], pricing.mesh, pricing.parts)
                contraction += dear - lowered.forward_s
            if node in unrepeated:
                unreached += total.forward_s
                unreached_dear += dear
            share = pricing.delayed_share(node)
            weights += share * (total + -1.0 * lowered).backward_s
            if share:
                delayed.add(node)
            if 0.0 < share < 1.0:
                later += pricing.ops.cost(node).written_bytes(assignments[node], pricing.mesh, pricing.parts)
                # A matrix product has one product for each pass; others read the incoming gradient again.
                twice += 0.0 if contracts else share * (total + -1.0 * lowered).backward_s
                twice += branch_s(pricing.ops.cluster.device)
        batches = pricing.mesh, pricing.parts
        saved = tuple(activations.saved_bytes(assignments, *batches, level) for level in LEVELS)
        recomputed = {tensor.node for tensor in activations.recomputed(assignments)}
        tiles, unmade, tiled_peak = activations.tiled(assignments, *batches)
        tiled = sum(pricing.ops.cluster.device.memory_seconds(tile.summed_bytes) for tile in tiles.values())
        # Where what follows needs the result once more, recomputation computes the region, and its backward does.
        reached = [region for region in tiles if region.result not in activations.unreached]
        tiled += sum(pricing.op(node, assignments[node]).forward_s for region in reached for node in region.made)
        return cls(
            compute=compute,
            inside=inside,
            contraction_s=contraction,
            recomputed_s=sum(pricing.op(node, assignments[node]).forward_s for node in recomputed - unrepeated),
            unreached_s=unreached,
            unreached_dear_s=unreached_dear,
            bookkeeping=bookkeeping_time(num_ops, pricing.ops.cluster.device),
            weights_s=weights,
            twice_s=twice,
            delayed_bytes=later
            + (activations.read_by(delayed, assignments, *batches) if memory.releases_early else saved[0]),
            saved=saved,
            unmade_bytes=unmade,
            tiled_s=tiled,
            peak=activations.backward.peak(assignments, *batches) if tiles else tiled_peak,
            tiled_peak=tiled_peak,
        )

    def block(
        self,
        pricing: Pricing,
        moved: Moves,
        past: Moves,
        held: tuple[ParameterPrice, ...],
        crossing: tuple[float | None, float],
    ) -> BlockPrice:
        """Price of a block. moved: redistributions into its ops. past: those of them that recomputation does not
        reach. crossing: bytes of a microbatch over a cut before the block, and of what comes back."""
        micro = sum((p.micro for p in held), ZERO)
        communication = self.inside + moved.all
        forward = self.compute.forward_s + communication.forward_s
        states = sum((pricing.state(p) for p in held), MemoryParts())
        gathered, unsharded, scattered = pricing.zero_bytes(held)
        dear = self.contraction_s + communication.forward_s - moved.recomputed_s
        # Without ops that recomputation does not reach.
        forward -= self.unreached_s + past.all.forward_s
        dear -= self.unreached_dear_s + past.all.forward_s - past.recomputed_s
        return BlockPrice(
            compute=self.compute + micro,
            communication=communication,
            recomputed=tuple(self._recomputed(level, forward, dear) for level in LEVELS),
            bookkeeping=self.bookkeeping,
            weights_s=self.weights_s + micro.backward_s,
            twice_s=self.twice_s,
            delayed_bytes=self.delayed_bytes,
            sync=pricing.bucket_sync(held),
            optimiser_s=sum(pricing.optimiser_s(p) for p in held),
            states=states,
            lasting_bytes=sum(pricing.lasting_bytes(p) for p in held),
            resting=sum((pricing.resting(p) for p in held), MemoryParts()),
            optimiser_bytes=pricing.optimiser_bytes(held),
            saved_bytes=self.saved,
            unmade_bytes=self.unmade_bytes,
            peak=self.peak,
            tiled_peak=self.tiled_peak,
            gathered_bytes=gathered,
            unsharded_bytes=unsharded,
            scattered_bytes=scattered,
            send_bytes=crossing[0],
            returned_bytes=crossing[1],
        )

    def _recomputed(self, level: str, forward_s: float, dear_s: float) -> OpTime:
        """What recomputation takes at a level. forward_s, dear_s: of what it reaches, as for ``rematerialised_s``."""
        if level == "none":
            return ZERO
        ops = rematerialised_s(level, forward_s, dear_s, self.recomputed_s) + (self.tiled_s if level == "full" else 0.0)
        return OpTime(0.0, ops) + self.bookkeeping


def _parameters(
    pricing: Pricing, layouts: Layouts, shared_once: bool
) -> tuple[dict[str, ParameterPrice], dict[str, Storage], dict[int, tuple[ParameterPrice, ...]]]:
    """Price and storage of every parameter, and the parameters that each block holds."""
    prices: dict[str, ParameterPrice] = {}
    storage: dict[str, Storage] = {}
    held: dict[int, list[ParameterPrice]] = {}
    kinds = pricing.workload.repetition.blocks
    for group in pricing.workload.parameters:
        uses = [layouts.need(node, position) for node, position in group.uses]
        storage.update(dict.fromkeys(group.names, stored(uses, len(pricing.mesh), trains=group.requires_grad)))
        made: dict[int | None, ParameterPrice] = {}
        for name, blocks in zip(group.names, group.blocks, strict=True):
            apart = pricing.zero_stages is not None and not (shared_once and len(blocks) > 1)
            for block in blocks[:1] if shared_once else blocks:
                alone = kinds[block].kind if apart else None
                price = made.get(alone)
                if price is None:
                    price = pricing.parameter(
                        group.numel, group.requires_grad, uses, alone, group.itemsize, narrow=group.narrow
                    )
                    made[alone] = price
                held.setdefault(block, []).append(price)
                prices[name] = price
    return prices, storage, {block: tuple(own) for block, own in held.items()}
