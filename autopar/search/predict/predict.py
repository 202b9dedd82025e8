"""The prediction of a step under an assignment and stage cuts.

The search, an estimate of pinned degrees and a plan edited by hand all use this one function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from autopar.cost_model.communication.collectives import point_to_point_time, slowdown_beside, time_over_stages
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.cost_model.schedule.pipeline_simulator import Timeline, simulate
from autopar.cost_model.schedule.stream_simulator import Span
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Action, Pipelining
from autopar.search.predict.communications import priced_steps
from autopar.search.predict.jitter import StragglerDelays, pass_seconds
from autopar.search.predict.kept_state import offloaded_bytes, rank_state_bytes
from autopar.search.predict.once_a_step import exposed_gathers, exposed_reductions
from autopar.search.predict.pairs import hidden_by_pairs
from autopar.search.predict.peak_memory import memory_profile, most_kept, most_on_host, peak_memory
from autopar.search.predict.step_tasks import StepCosts, run_step
from autopar.search.pricing.block_moves import layouts_of, needs_of
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.block_prices import Priced
from autopar.search.pricing.pricing import MASTER, Pricing
from autopar.search.stages.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One predicted step. Per stage: seconds of a microbatch forward and backward, and of both passes of a split
    backward.

    memory: bytes of each rank of the pipeline at its peak. explain: makes ``breakdown_s``; costs: of the tasks that
    ``spans`` runs. memory_profile: of a rank of the pipeline, the bytes held in each of its passes, in order. after_s:
    of a rank of each place in the pipeline, seconds from its last pass to the end of its step; working_after_s: of
    those, seconds in which it does not wait for other places. state: bytes of parameters and optimiser state that the
    fullest rank keeps from step to step.
    offloaded: bytes in host memory and on disk, of the rank with most there.
    """

    step_time_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    inputs_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    memory: tuple[MemoryParts, ...]
    after_s: tuple[float, ...]
    working_after_s: tuple[float, ...]
    timeline: Timeline
    explain: Callable[[], dict[str, float]] = field(repr=False, compare=False)
    memory_profile: Callable[[int], list[tuple[Action, MemoryParts]]] = field(repr=False, compare=False)
    state: Callable[[], float] = field(repr=False, compare=False)
    offloaded: Callable[[], tuple[float, float]] = field(repr=False, compare=False)
    costs: StepCosts = field(repr=False, compare=False)

    @cached_property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds of the rank with the most to do; they add up to ``step_time_s``."""
        return self.explain()

    @cached_property
    def spans(self) -> list[Span]:
        """The step with compute and communication on streams of their own, for a rank of each place in the pipeline."""
        return run_step(self.costs)

    @cached_property
    def kept_bytes(self) -> tuple[float, ...]:
        """The most bytes of activations that the passes of each rank of the pipeline hold for later ones."""
        blocks, stages = self.costs.blocks, self.costs.stages
        return tuple(most_kept(blocks, stages, order) for order in self.costs.shape.orders())

    @cached_property
    def host_bytes(self) -> tuple[float, ...]:
        """The most bytes of activations that wait in host memory, of each rank of the pipeline."""
        blocks, stages = self.costs.blocks, self.costs.stages
        return tuple(most_on_host(blocks, stages, order) for order in self.costs.shape.orders())

    @property
    def overlapped_s(self) -> float:
        """Seconds of a step by ``spans``, where ``step_time_s`` has a closed form for what overlaps."""
        return self.spans[-1].end_s

    @property
    def period_s(self) -> float:
        """Seconds from a step to the next, if each rank began the next one as soon as it is through with its own part.

        ``step_time_s`` counts from the first pass of the first rank to the end of the last one, since ranks meet at the
        end of a step for the loss and the norm of the gradients.
        """
        own = zip(self.timeline.events, self.working_after_s, strict=True)
        return max(after + (events[-1].end_s - events[0].start_s if events else 0.0) for events, after in own)

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank at its peak."""
        return max(parts.total for parts in self.memory)


def predict(
    pricing: Pricing, assignment: tuple[Assignment, ...], priced: Priced, stages: Sequence[Stage], shape: Pipelining
) -> Predicted:
    """Simulate a step of ``shape`` on ``stages``. priced: ``evaluate`` of the same ``assignment``."""
    cluster, delays = pricing.ops.cluster, StragglerDelays.of(pricing, assignment, priced, stages, shape)
    priced, pricing = delays.noise_free, delays.pricing
    blocks = priced.blocks
    inside: list[Sequence[BlockPrice]] = []
    forward, backward, inputs, weights, gathered = [], [], [], [], []
    for number, stage in enumerate(stages):
        inside.append(blocks[stage.first : stage.last + 1])
        ahead, whole, exposed = pass_seconds(priced, stage, pricing.prefetch)
        whole += delays.backward_s[number]
        later = sum(block.weights_s for block in inside[number])
        forward.append(ahead + delays.forward_s[number])
        backward.append(whole)
        gathered.append(exposed)
        # The first stage sends no gradient: its whole backward can wait.
        inputs.append(whole - later if number else 0.0)
        weights.append(later + sum(block.twice_s for block in inside[number]) if number else whole)
    held = [[stages[number] for number in shape.stages_of(rank)] for rank in range(shape.num_ranks)]
    optimiser = []
    for own in held:
        mine = [blocks[b] for stage in own for b in range(stage.first, stage.last + 1)]
        optimiser.append(sum(b.optimiser_s for b in mine) + cluster.device.kernel_launch_s)
    links = [
        cluster.send_link(pricing.mesh, shape.rank_of(number), shape.rank_of(number + 1))
        for number in range(len(stages) - 1)
    ]
    cuts = [(blocks[stage.first], link) for stage, link in zip(stages[1:], links, strict=True)]
    sends, returns = [block.send_s(link) for block, link in cuts], [block.return_s(link) for block, link in cuts]
    copies = [0.0] * len(stages)
    if cluster.device.is_cpu:
        # The core that computes also sends and receives.
        for number, link in enumerate(links):
            if shape.rank_of(number) != shape.rank_of(number + 1):
                for neighbour in (number, number + 1):
                    copies[neighbour] += point_to_point_time(0.0, link)
        for passes in (forward, backward, inputs):
            passes[:] = map(sum, zip(passes, copies, strict=True))
    # The first microbatch waits in every stage for what is gathered once a step.
    opening = exposed_gathers(inside, shape, ahead=cluster.device.stack.gathers_ahead)
    for number, stage in enumerate(stages):
        opening[number] += pricing.maxima_s(
            p for b in range(stage.first, stage.last + 1) for p in priced.held.get(b, ())
        )
    each = [
        [own + first, *[own] * (shape.num_microbatches - 1)] if first else own
        for own, first in zip(forward, opening, strict=True)
    ]
    hidden_s = hidden_by_pairs(pricing, inside, stages, shape, forward, backward)
    timeline = simulate(
        shape,
        each,
        backward,
        (inputs, weights),
        p2p_forward_s=sends,
        p2p_backward_s=returns,
        hidden_s=hidden_s,
    )
    sync = [
        exposed_reductions({number: inside[number] for number in shape.stages_of(rank)}, events) + delays.sync_s[rank]
        for rank, events in enumerate(timeline.events)
    ]
    summed = [(events[-1].end_s if events else 0.0) + s for events, s in zip(timeline.events, sync, strict=True)]
    shared = sums_over_stages(pricing, priced, stages, shape)
    for holders, seconds in shared.items():
        end = max(summed[rank] for rank in holders) + seconds
        for rank in holders:
            summed[rank] = end
            sync[rank] += seconds
    tails = list(map(sum, zip(sync, optimiser, strict=True)))
    ends = list(map(sum, zip(summed, optimiser, strict=True)))
    busy = timeline.busy_s
    busiest = max(range(len(ends)), key=lambda rank: busy[rank] + tails[rank])
    return Predicted(
        step_time_s=max(ends),
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        inputs_s=tuple(inputs) if shape.splits_backward else (),
        weights_s=tuple(weights) if shape.splits_backward else (),
        memory=tuple(
            peak_memory(
                priced,
                stages,
                order,
                _whole_copies(pricing, priced, own),
                prefetch=pricing.prefetch,
                memory=pricing.memory,
            )
            for own, order in zip(held, shape.orders(), strict=True)
        ),
        memory_profile=partial(_memory_profile, pricing, priced, stages, shape),
        state=partial(rank_state_bytes, priced, held),
        offloaded=partial(offloaded_bytes, priced, held),
        timeline=timeline,
        after_s=tuple(
            end - (events[-1].end_s if events else 0.0) for end, events in zip(ends, timeline.events, strict=True)
        ),
        working_after_s=tuple(tails),
        explain=partial(
            _breakdown,
            pricing,
            assignment,
            priced,
            held[busiest],
            max(ends),
            sync[busiest] - delays.sync_s[busiest] + sum(opening[number] for number in shape.stages_of(busiest)),
            optimiser[busiest],
            sum(gathered[number] for number in shape.stages_of(busiest)),
            delays.sync_s[busiest]
            + pricing.num_microbatches * sum(delays.of_passes()[number] for number in shape.stages_of(busiest)),
        ),
        costs=StepCosts(
            blocks=blocks,
            names=[block.name for block in pricing.workload.repetition.blocks],
            stages=stages,
            shape=shape,
            sends=sends,
            returns=returns,
            shared_s=shared,
            passing_s=[own + passes / 2 for own, passes in zip(copies, delays.of_passes(), strict=True)],
            prefetch=pricing.prefetch,
            gathers_ahead=cluster.device.stack.gathers_ahead,
            sends_slow=max((slowdown_beside(own.ring_bandwidth(2), cluster.device) for own in links), default=0.0),
            prelude_s=priced.prelude_s,
            launch_s=cluster.device.kernel_launch_s,
            hidden_s=hidden_s,
        ),
    )


def sums_over_stages(
    pricing: Pricing, priced: Priced, stages: Sequence[Stage], shape: Pipelining
) -> dict[tuple[int, ...], float]:
    """Ranks of the pipeline -> seconds to sum the gradients of the parameters that stages of all of them use."""
    found: dict[tuple[int, ...], float] = {}
    if len(stages) == 1:
        return found
    for name, used in pricing.workload.shared_parameters.items():
        own = {shape.rank_of(n) for n, s in enumerate(stages) if any(s.first <= block <= s.last for block in used)}
        price = priced.parameters[name]
        if len(own) > 1 and price.requires_grad:
            holders = tuple(sorted(own))
            payload = MASTER * price.numel / (price.shards if price.zero_axes else 1)
            seconds = time_over_stages(payload, pricing.mesh, holders, pricing.ops.cluster)
            found[holders] = found.get(holders, 0.0) + seconds
    return found


def _memory_profile(
    pricing: Pricing, priced: Priced, stages: Sequence[Stage], shape: Pipelining, rank: int
) -> list[tuple[Action, MemoryParts]]:
    copies = _whole_copies(pricing, priced, [stages[number] for number in shape.stages_of(rank)])
    order = shape.orders()[rank]
    return list(memory_profile(priced, stages, order, copies, prefetch=pricing.prefetch, memory=pricing.memory))


def _whole_copies(pricing: Pricing, priced: Priced, stages: Sequence[Stage]) -> MemoryParts:
    """What it adds that a parameter of two stages of a rank is held once, but whole, while ZeRO shards one of each."""
    total = MemoryParts()
    if len(stages) == 1:
        return total
    for name, used in pricing.workload.shared_parameters.items():
        copies = len({block for block in used for s in stages if s.first <= block <= s.last})
        if sum(any(s.first <= block <= s.last for block in used) for s in stages) > 1:
            price = priced.parameters[name]
            total += pricing.state(price, whole=True) + -copies * pricing.state(price)
    return total


def _breakdown(
    pricing: Pricing,
    assignment: tuple[Assignment, ...],
    priced: Priced,
    stages: Sequence[Stage],
    step_s: float,
    sync_s: float,
    optimiser_s: float,
    gathered_s: float,
    straggler_delay_s: float,
) -> dict[str, float]:
    count = pricing.num_microbatches
    inside = [(stage, b) for stage in stages for b in range(stage.first, stage.last + 1)]
    blocks = [priced.blocks[b] for _, b in inside]
    parts = {"compute": count * (len(stages) * priced.prelude_s + sum(b.compute.total_s for b in blocks))}
    recomputed = count * sum(priced.blocks[b].recomputed[stage.level(b)].total_s for stage, b in inside)
    if recomputed:
        parts["rematerialization"] = recomputed
    copied = count * sum(priced.blocks[b].host[stage.level(b)].added.total_s for stage, b in inside)
    if copied:
        parts["copies_to_host"] = copied
    parts.update(_by_axis(pricing, assignment, stages, count * sum(b.communication.total_s for b in blocks)))
    if sync_s + count * gathered_s > 0:
        parts["gradient_sync"] = sync_s + count * gathered_s
    if straggler_delay_s:
        parts["waiting"] = straggler_delay_s
    parts["optimizer"] = optimiser_s
    parts["bubble"] = max(0.0, step_s - sum(parts.values()))
    return parts


def _by_axis(
    pricing: Pricing, assignment: tuple[Assignment, ...], stages: Sequence[Stage], total_s: float
) -> dict[str, float]:
    """``total_s`` seconds of communication of a rank, divided among the mesh axes they are spent on."""
    workload, mesh = pricing.workload, pricing.mesh
    layouts, spent = layouts_of(workload, assignment), [0.0] * len(mesh)

    def here(block: int) -> bool:
        return any(stage.first <= block <= stage.last for stage in stages)

    for transfer in workload.transfers:
        times = sum(map(here, transfer.blocks))
        if not times:
            continue
        source = layouts.made(transfer.tensor.node, transfer.tensor.result)
        for need in needs_of(layouts, transfer):
            for step, _, time in priced_steps(pricing, transfer, source, *need):
                spent[step.axis] += times * time.total_s
    blocks = workload.repetition.blocks
    kinds = Counter(blocks[b].kind for stage in stages for b in range(stage.first, stage.last + 1))
    for node, choices in layouts.assignments.items():
        # A node of the first block of a kind stands for those of all of them.
        block = workload.repetition.block_of.get(node)
        if block is None or not kinds[blocks[block].kind]:
            continue
        rule = workload.rule(node)
        inside = [axis for axis, choice in enumerate(choices) if choice in rule.lowered]
        # Among ranks with the same tokens experts exchange nothing inside.
        inside = [axis for axis in inside if choices[axis] in rule.joint] or inside
        for axis in inside:
            spent[axis] += kinds[blocks[block].kind] * pricing.lowering(node, choices).total_s / len(inside)
    whole = sum(spent)
    if not whole or not total_s:
        return {}
    return {f"communication_{mesh.names[a]}": total_s * s / whole for a, s in enumerate(spent) if s}
