"""Prices of an assignment, block by block: the input of stage cuts and of the prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from torch import fx

from autopar.cost_model.communication.collectives import point_to_point_time
from autopar.cost_model.communication.gradient_sync import BucketSync, branch_s, exposed_time, rematerialised_s
from autopar.cost_model.communication.host_copies import HostCopies
from autopar.cost_model.compute.flops import is_contraction
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.device import Device, Link
from autopar.cost_model.memory.backward_peak import BackwardPeak
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.placed.layouts import Layouts
from autopar.ir.placed.storage import Storage, find_data_axes, stored
from autopar.ir.rematerialisation import LEVELS
from autopar.ir.rule import Assignment
from autopar.search.pricing.block_moves import Moves, crossing_bytes, layouts_of, moved_by
from autopar.search.pricing.host_link import host_copies, link_taken
from autopar.search.pricing.kept_graph import KeptCost, gathers_key, kept_costs
from autopar.search.pricing.parameter_price import ParameterPrice
from autopar.search.pricing.pricing import Pricing
from autopar.search.stages.stage import FULL, BlockCost, Stage, recomputed_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """One block instance on one rank.

    compute, communication: of one microbatch, forward and backward. recomputed_s: seconds of recomputation, at each of
    LEVELS, then with each set of ``Pricing.kept``, as everything that is by level. sync: gradient and ZeRO
    communication, not yet overlapped. optimiser_s: once a step.
    weights_s: seconds of the backward that a split backward may delay (its W pass); twice_s, delayed_bytes: seconds
    that it then spends twice, and bytes of a microbatch that it holds until then. states: bytes held inside a step,
    lasting_bytes of them gradients allocated from the step before. resting, optimiser_bytes: bytes held while the
    optimiser runs, and its workspace for a parameter. saved_bytes: activations of a microbatch at each level; host: of
    those that wait in host memory.
    unmade_bytes: of activations that level full does not make again, since it computes wide layers in tiles. peak,
    tiled_peak: further bytes of the backward, and at level full. gathered_bytes: parameters that ZeRO has gathered
    while the block runs, without prefetched ones; unsharded_bytes: their gradients, as computed; scattered_bytes: the
    buffer that those are scattered from. send_bytes: of a microbatch, for a cut before this block; None where it cannot
    be cut. returned_bytes: of the gradients that come back over the cut.
    """

    compute: OpTime
    communication: OpTime
    recomputed_s: tuple[float, ...]
    weights_s: float
    twice_s: float
    delayed_bytes: float
    sync: BucketSync
    optimiser_s: float
    states: MemoryParts
    lasting_bytes: float
    resting: MemoryParts
    optimiser_bytes: float
    saved_bytes: tuple[float, ...]
    host: tuple[HostCopies, ...] = (HostCopies(),) * len(LEVELS)
    unmade_bytes: float
    peak: BackwardPeak
    tiled_peak: BackwardPeak
    gathered_bytes: float
    unsharded_bytes: float
    scattered_bytes: float
    send_bytes: float | None
    returned_bytes: float

    def send_s(self, link: Link) -> float:
        """Seconds to send a microbatch over a cut before this block; infinite where it cannot be cut."""
        return inf if self.send_bytes is None else point_to_point_time(self.send_bytes, link)

    def return_s(self, link: Link) -> float:
        """Seconds to send the gradients of a microbatch back over that cut; 0 where there are none."""
        return point_to_point_time(self.returned_bytes, link) if self.returned_bytes else 0.0

    def working_bytes(self, prefetch: int, level: int = 0) -> float:
        """Most bytes while the block runs backward, beside states and activations that are saved or made again."""
        peak = self.peak_of(level)
        if not self.scattered_bytes:
            return peak.merged + (1 + prefetch) * self.gathered_bytes
        inside = peak.unsharded + self.gathered_bytes
        return max(inside, peak.end + self.unsharded_bytes) + self.scattered_bytes + prefetch * self.gathered_bytes

    def recomputed_bytes(self, level: int) -> float:
        """Activations that the block makes again in its backward at once, at a level."""
        return recomputed_bytes(self.saved_bytes, level, self.unmade_bytes)

    def peak_of(self, level: int) -> BackwardPeak:
        """Further bytes of the backward, at a level."""
        return self.tiled_peak if level == FULL else self.peak

    def keeping(self, kept: Sequence[KeptCost | None], device: Device, link: OpTime) -> BlockPrice:
        """The price with these sets of tensors beside the levels. None: of everything. link: seconds in which other
        copies take the link to the host."""
        every = [KeptCost(self.saved_bytes[0], 0.0, 0.0, 0.0) if own is None else own for own in kept]
        return replace(
            self,
            saved_bytes=(*self.saved_bytes, *(own.num_bytes - own.host_bytes for own in every)),
            recomputed_s=(*self.recomputed_s, *(own.seconds for own in every)),
            host=(*self.host, *(host_copies(own, device, self.computed(own.seconds), link) for own in every)),
        )

    def computed(self, recomputed_s: float) -> OpTime:
        """Seconds of one microbatch, without ZeRO's gathers and scatters and copies to the host."""
        return self.compute + self.communication + OpTime(0.0, recomputed_s)

    def forward_s(self, level: int) -> float:
        """Seconds of one microbatch, without ZeRO's gathers."""
        return self.compute.forward_s + self.communication.forward_s + self.host[level].added.forward_s

    def backward_s(self, level: int) -> float:
        """Seconds of one microbatch, without ZeRO's gathers and scatters."""
        return self.computed(self.recomputed_s[level]).backward_s + self.host[level].added.backward_s


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
        key = (block.kind, id(arrivals), *(id(price) for price in held))
        if key not in made:
            reaches = workload.kept(pricing.memory).blocks[block.kind]
            past = [n for n in arrivals.transfers if reaches.is_past(node for node, _ in workload.transfers[n].uses)]
            moved, left = (sum((moves[n] for n in numbers), Moves()) for numbers in (arrivals.transfers, past))
            crossing = crossing_bytes(pricing, arrivals.crossing, layouts)
            price = own[block.kind].block(pricing, moved, left, held, crossing)
            costs = kept_costs(pricing, assignment, layouts, block.kind) if pricing.kept else ()
            made[key] = price.keeping(costs, pricing.ops.cluster.device, link_taken(pricing, held)) if costs else price
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
    contractions and collectives. tiled_s: what full rematerialisation takes longer for computing wide layers in tiles.
    """

    compute: OpTime
    inside: OpTime
    contraction_s: float
    recomputed_s: float
    unreached_s: float
    unreached_dear_s: float
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
        for node in first.nodes:
            if node not in assignments:
                continue
            total = pricing.op(node, assignments[node])
            lowered = pricing.lowering(node, assignments[node])
            compute += total + -1.0 * lowered
            inside += lowered
            contracts = is_contraction(node, workload.rule(node))
            if contracts:
                contraction += (total + -1.0 * lowered).forward_s
            if node in unrepeated:
                unreached += total.forward_s
                unreached_dear += total.forward_s if contracts else lowered.forward_s
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
            recomputed_s=tuple(
                rematerialised_s(level, forward, dear, self.recomputed_s) + (self.tiled_s if level == "full" else 0.0)
                for level in LEVELS
            ),
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
