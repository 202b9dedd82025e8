"""The error of a search in which nothing fits: how far off the closest plan is, on which stage, why, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf, sqrt

from autopar.cost_model.memory.fit_probability import fit_probability
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.placement import Layout, Shard
from autopar.search.outer.configuration import Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.predict.to_plan import name_axes
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.search.stages.stage import Stage, stage_memory

GIB = float(1 << 30)


def explain(solver: Solver, constraints: Constraints, tried: Sequence[tuple[Configuration, Inner]]) -> InfeasiblePlan:
    """The error for a search in which every one of ``tried`` was too large."""
    workload, cluster = solver.workload, solver.cluster
    if not tried:
        return InfeasiblePlan(
            f"no configuration of {cluster.num_gpus} GPUs satisfies the constraints: {_stated(constraints)}.\n"
            f"  the model has {_blocks(workload)}, which bounds pp, and a global batch of "
            f"{solver.batch_size}, which dp times the number of microbatches has to divide.\n"
            "  try: fewer constraints"
        )
    if solver.saved_bytes < inf:
        kept = min(_least_saved(solver, c, i) for c, i in _promising(solver, tried))
        if kept < inf:
            return InfeasiblePlan(
                f"no plan keeps as little for its backward: the least is {kept / GIB:.3g} GiB on a rank, "
                f"the budget is {solver.saved_bytes / GIB:.3g} GiB.\n  try: that, or smaller microbatches"
            )
        solver = replace(solver, saved_bytes=inf)
    need, configuration, inner = min(
        ((_least_budget(solver, c, i), c, i) for c, i in _promising(solver, tried)), key=lambda found: found[0]
    )
    found = solver.cuts(configuration, inner, need * 1.0001 + 1)
    assert found is not None
    configuration = replace(configuration, mesh=name_axes(workload, configuration.mesh, inner.assignment))
    stages = found.stages
    costs = inner.costs(configuration.num_stages)
    waiting = configuration.pipelining.waiting()
    saving = [live - others for live, others in zip(configuration.pipelining.live(), waiting, strict=True)]
    number = max(range(len(stages)), key=lambda n: stage_memory(costs, stages[n], saving[n], waiting[n]))
    parts = _parts(inner, stages[number], saving[number], waiting[number])
    lines = [
        f"nothing fits {cluster.num_gpus} x {cluster.device.name}: stage {number} on mesh {configuration.mesh} needs "
        f"{need / GIB:.3g} GiB per rank; budget is {solver.budget_bytes / GIB:.3g} GiB.",
        f"  closest: {configuration}",
        "  of it: " + ", ".join(f"{n} {b / GIB:.3g}" for n, b in parts.as_bytes().items() if b > 0.01 * need) + " GiB",
    ]
    lines += _largest(configuration, inner, range(stages[number].first, stages[number].last + 1))
    lines.append(f"  try: {_advice(solver, constraints, need)}")
    return InfeasiblePlan("\n".join(lines))


def _least_saved(solver: Solver, configuration: Configuration, inner: Inner) -> float:
    """Bytes of activations of a rank with which a configuration fits, within a hundredth; infinite if it does not."""
    free = replace(solver, saved_bytes=inf)
    if free.cuts(configuration, inner, solver.budget_bytes) is None:
        return inf
    low, high = solver.saved_bytes, max(solver.budget_bytes, solver.saved_bytes)
    while high > 1.01 * low:
        middle = sqrt(low * high)
        fits = replace(solver, saved_bytes=middle).cuts(configuration, inner, solver.budget_bytes) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high


def _blocks(workload: Workload) -> str:
    """How many blocks a model has, and which parts of it they are."""
    kinds = [f"{kind.repeats} x {kind.name}" if kind.repeats > 1 else kind.name for kind in workload.repetition.kinds]
    which = ", ".join(kinds[:5]) + (", ..." if len(kinds) > 5 else "")
    return f"{workload.num_blocks} block{'s' if workload.num_blocks != 1 else ''} ({which})"


def _parts(inner: Inner, stage: Stage, live: int, waiting: int) -> MemoryParts:
    """What ``stage_memory`` of a stage is made of."""
    blocks = inner.priced.blocks[stage.first : stage.last + 1]
    kept = live * sum(block.saved_bytes[stage.level(number)] for number, block in enumerate(blocks, stage.first))
    kept += waiting * sum(block.delayed_bytes for block in blocks)
    every = [(block, level) for block in blocks for level in stage.levels]
    recomputed = max(block.recomputed_bytes(level) for block, level in every)
    working = max(block.working_bytes(inner.pricing.prefetch, level) for block, level in every)
    states = sum((block.states for block in blocks), MemoryParts())
    workspace = inner.pricing.memory.fragmentation * (kept + recomputed)
    return states + MemoryParts(activations=kept, transient=working + recomputed, workspace=workspace)


def _promising(
    solver: Solver, tried: Sequence[tuple[Configuration, Inner]], limit: int = 24
) -> list[tuple[Configuration, Inner]]:
    """The few with the least state and activations a stage."""

    def size(pair: tuple[Configuration, Inner]) -> float:
        configuration, inner = pair
        blocks = inner.priced.blocks
        held = sum(b.states.total + min(b.saved_bytes) for b in blocks) / configuration.num_stages
        return held + max(b.working_bytes(inner.pricing.prefetch) for b in blocks)

    cuttable = [pair for pair in tried if solver.cuts(*pair, float("inf")) is not None]
    return sorted(cuttable or tried, key=size)[:limit]


def _least_budget(solver: Solver, configuration: Configuration, inner: Inner) -> float:
    """Least memory with which stages can be cut, to 1 in 1000, by bisection."""
    low = high = solver.budget_bytes
    while solver.cuts(configuration, inner, high) is None:
        low, high = high, high * 2
        if high > 1e18:
            return float("inf")
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if solver.cuts(configuration, inner, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _largest(configuration: Configuration, inner: Inner, blocks: range, count: int = 3) -> list[str]:
    """Lines on the parameters of a stage with the most state."""
    workload, pricing = inner.pricing.workload, inner.pricing
    found: dict[str, tuple[float, str]] = {}
    for group in workload.parameters:
        for name, used in zip(group.names, group.blocks, strict=True):
            if any(block in blocks for block in used):
                size = pricing.state(inner.priced.parameters[name]).total
                found[workload.captured.parameters[name].name] = (
                    size,
                    _placement(inner.priced.storage[name].layout, configuration),
                )
    top = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))[:count]
    return [
        f"  largest: {name} with gradient and Adam state, {size / GIB:.3g} GiB, {where}"
        for name, (size, where) in top
        if size  # offloaded state takes none of the device's memory
    ]


def _placement(layout: Layout, configuration: Configuration) -> str:
    cut = [
        f"Shard({p.dim}) on {name}"
        for p, name in zip(layout, configuration.mesh.names, strict=True)
        if isinstance(p, Shard)
    ]
    return ", ".join(cut) if cut else "Replicate()"


def _advice(solver: Solver, constraints: Constraints, need: float) -> str:
    ways = []
    if constraints.zero is not None and constraints.zero < 3:
        ways.append("--zero 3")
    if constraints.remat not in (None, "full"):
        ways.append("--remat full")
    pinned = [
        role for role in ("pp", "dp", "tp", "cp", "ep") if constraints.axes is None and getattr(constraints, role)
    ]
    if pinned:
        ways.append("leave " + ", ".join(f"--{role}" for role in pinned) + " to the search")
    if constraints.num_microbatches is not None or constraints.microbatch_size is not None:
        ways.append("smaller microbatches")
    gpus = solver.cluster.num_gpus
    while gpus * solver.budget_bytes < need * solver.cluster.num_gpus:
        gpus *= 2
    ways.append(f"--gpus {gpus}")
    device = solver.cluster.device
    ways.append(f"GPUs of {(need / constraints.memory_share + device.reserved_bytes) / GIB:.3g} GiB")
    if (likely := fit_probability(need, device.usable_bytes)) >= 0.01:
        ways.append(f"--fit-probability {floor(100 * likely) / 100:.2g}")
    return ", or ".join(ways)


def _stated(constraints: Constraints) -> str:
    default = Constraints()
    given = {
        name: getattr(constraints, name)
        for name in Constraints.__dataclass_fields__
        if getattr(constraints, name) != getattr(default, name)
    }
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "none given"
