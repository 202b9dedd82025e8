"""The prediction for a full assignment and stage cuts.

The search, an estimate of pinned degrees and a plan edited by hand are all judged by this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_model.collectives import point_to_point_time
from autopar.cost_model.memory import FRAGMENTATION, MemoryParts
from autopar.cost_model.simulator import Timeline, simulate
from autopar.cost_model.step import exposed_time
from autopar.ir.placement import Layout
from autopar.ir.redistribution import redistribute
from autopar.ir.rule import Assignment
from autopar.ir.schedule import Pipelining
from autopar.search.evaluate import Priced, layout_of, spread
from autopar.search.pricing import Pricing
from autopar.search.stages import Stage
from autopar.search.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One step. Per stage: seconds of a microbatch forward and backward, and bytes of a rank.

    breakdown_s: of the stage that finishes last; its parts add up to ``step_time_s``.
    """

    step_time_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory: tuple[MemoryParts, ...]
    breakdown_s: dict[str, float]
    timeline: Timeline

    @property
    def peak_bytes(self) -> float:
        return max(parts.total for parts in self.memory)


def predict(
    pricing: Pricing, leaders: tuple[Assignment, ...], priced: Priced, stages: Sequence[Stage], shape: Pipelining
) -> Predicted:
    """Simulate a step of ``shape`` on ``stages``. priced: ``evaluate`` of the same ``leaders``."""
    blocks = priced.blocks
    cluster = pricing.ops.cluster
    forward, backward, tails, sync = [], [], [], []
    for stage in stages:
        inside = range(stage.first, stage.last + 1)
        forward.append(priced.prelude_s + sum(blocks[b].forward_s for b in inside))
        backward.append(sum(blocks[b].backward_s(stage.level(b)) for b in inside))
        once = exposed_time(
            sum(blocks[b].sync.step_s for b in inside), sum(blocks[b].compute.backward_s for b in inside)
        )
        sync.append(once)
        tails.append(once + sum(blocks[b].optimiser_s for b in inside) + cluster.device.kernel_launch_s)
    sends: list[float] = []
    if len(stages) > 1:
        link = cluster.stage_link(pricing.mesh, len(stages))
        sends = [point_to_point_time(blocks[stage.first].send_bytes or 0.0, link) for stage in stages[1:]]
    timeline = simulate(shape, forward, backward, p2p_forward_s=sends)
    ends = [(events[-1].end_s if events else 0.0) + tail for events, tail in zip(timeline.events, tails, strict=True)]
    last = max(range(len(ends)), key=ends.__getitem__)
    return Predicted(
        step_time_s=ends[last],
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        memory=tuple(
            stage_parts(pricing, priced, stage, live) for stage, live in zip(stages, shape.live(), strict=True)
        ),
        breakdown_s=_breakdown(pricing, leaders, priced, stages[last], ends[last], sync[last], tails[last]),
        timeline=timeline,
    )


def stage_parts(pricing: Pricing, priced: Priced, stage: Stage, live: int) -> MemoryParts:
    """Bytes of one rank of a stage with ``live`` microbatches in flight; adds up to ``stages.stage_memory``."""
    inside = [(b, priced.blocks[b]) for b in range(stage.first, stage.last + 1)]
    strongest = 2 if stage.full else 1 if stage.selective else 0
    activations = live * sum(block.saved_bytes[stage.level(b)] for b, block in inside)
    recomputed = max(block.saved_bytes[0] - block.saved_bytes[strongest] for _, block in inside)
    transient = max(block.working_bytes + block.gathered_bytes for _, block in inside)
    return sum((block.states for _, block in inside), MemoryParts()) + MemoryParts(
        activations=activations,
        transient=transient + recomputed,
        workspace=FRAGMENTATION * (activations + recomputed),
    )


def _breakdown(
    pricing: Pricing,
    leaders: tuple[Assignment, ...],
    priced: Priced,
    stage: Stage,
    step_s: float,
    sync_s: float,
    tail_s: float,
) -> dict[str, float]:
    count = pricing.num_microbatches
    inside = range(stage.first, stage.last + 1)
    blocks = [priced.blocks[b] for b in inside]
    parts = {"compute": count * (priced.prelude_s + sum(b.compute.total_s for b in blocks))}
    recomputed = count * sum(priced.blocks[b].recomputed_s[stage.level(b)] for b in inside)
    if recomputed:
        parts["rematerialization"] = recomputed
    parts.update(_by_axis(pricing, leaders, stage, count * sum(b.communication.total_s for b in blocks)))
    micro = count * sum(
        b.forward_s
        - b.compute.forward_s
        - b.communication.forward_s
        + b.backward_s(0)
        - b.compute.backward_s
        - b.communication.backward_s
        for b in blocks
    )
    if sync_s + micro > 0:
        parts["gradient_sync"] = sync_s + micro
    parts["optimizer"] = tail_s - sync_s
    parts["bubble"] = max(0.0, step_s - sum(parts.values()))
    return parts


def _by_axis(pricing: Pricing, leaders: tuple[Assignment, ...], stage: Stage, total_s: float) -> dict[str, float]:
    """``total_s`` seconds of communication in a stage, divided among the mesh axes they are spent on."""
    load, mesh = pricing.workload, pricing.mesh
    assignments = spread(load, leaders)
    spent = [0.0] * len(mesh)
    for transfer in load.transfers:
        times = sum(stage.first <= block <= stage.last for block in transfer.blocks)
        if not times:
            continue
        source = layout_of(pricing, transfer.tensor, assignments, leaders[load.clusters.inputs.index])
        wanted = dict.fromkeys(load.rule(n).operand_layout(p, assignments[n]) for n, p in transfer.uses)
        for need in wanted:
            for axis, seconds in _axis_seconds(pricing, transfer.tensor.numel, source, *need).items():
                spent[axis] += times * seconds
    for node, assignment in assignments.items():
        block = load.folding.block_of.get(node)
        lowered = load.rule(node).lowered
        for axis, choice in enumerate(assignment):
            if block is not None and choice in lowered and stage.first <= block <= stage.last:
                spent[axis] += pricing.lowering(node, assignment).total_s
    whole = sum(spent)
    if not whole or not total_s:
        return {}
    return {f"communication_{mesh.names[a]}": total_s * s / whole for a, s in enumerate(spent) if s}


def _axis_seconds(pricing: Pricing, numel: int, source: Layout, value: Layout, grad: Layout) -> dict[int, float]:
    steps = redistribute(source, value, grad)
    found: dict[int, float] = {}
    before = 0.0
    for number, step in enumerate(steps):
        after = pricing.moves.fabric.redistribution_time(steps[: number + 1], numel, 1, source).total_s
        found[step.axis] = found.get(step.axis, 0.0) + after - before
        before = after
    return found


def tokens_per_step(load: Workload) -> int:
    """Tokens of the first step input, or samples if it holds no token ids."""
    for node in load.clusters.input_dims:
        value = node.meta["val"]
        if not value.is_floating_point() and value.dim() >= 2:
            return int(value.numel())
    return load.captured.batch_size
