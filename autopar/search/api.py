"""Entry points of the search for a captured model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import gcd, inf, prod

from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.errors import InfeasiblePlan, InvalidCluster
from autopar.ir.graph import CapturedModel
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.placed.assign import assignment_of, check_choices
from autopar.ir.plan import Plan, Recipe
from autopar.ir.rule import Assignment
from autopar.search.outer.best_first import Outer, Progress
from autopar.search.outer.configuration import Candidate, Configuration, Inner
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.found_order import best_order
from autopar.search.outer.infeasible import explain
from autopar.search.outer.kept_sets import best_kept
from autopar.search.outer.known_configurations import Known
from autopar.search.outer.larger_microbatches import with_larger_microbatches
from autopar.search.outer.offloads import has_room, no_room, offloads
from autopar.search.outer.prices import Prices
from autopar.search.outer.refine import refine
from autopar.search.predict.predict import Predicted, predict
from autopar.search.predict.to_plan import plan_of
from autopar.search.pricing.block_prices import data_axes_of, evaluate, evaluate_stages
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.annotation_limits import check_annotations
from autopar.search.problem.constraints import Constraints, NoOption
from autopar.search.problem.forbidden_placements import check_forbidden
from autopar.search.problem.kept_sets import level_names, sets_of
from autopar.search.problem.spread_experts import spread_experts
from autopar.search.problem.workload import Workload
from autopar.search.recipe_choice import fastest_for_each
from autopar.search.result import Baseline, SearchResult
from autopar.search.stages.stage import Stage


def search_captured(
    captured: CapturedModel,
    cluster: Cluster,
    constraints: Constraints | None = None,
    *,
    workload: Workload | None = None,
    prices: Prices | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    known: Sequence[Known] = (),
    report: Callable[[Progress], object] = lambda progress: None,
) -> SearchResult:
    """The fastest plan for training ``captured`` on all of ``cluster`` under ``constraints``.

    workload: the analysis of ``captured`` for this precision, if it is there already; prices: of it on ``cluster``
    (``prices_of``), if so. batch_size: of a step, if that is not the captured batch but an equal part of it. samples:
    of a step, if some microbatches have one less than those of the captured batch (``planning_rows``). known: of the
    best plans for other sizes (``best_of``), to begin with. report: called now and then.
    Interrupted by the user it returns the best plan so far.
    Deterministic. Raises InfeasiblePlan, saying why, if there is none.
    """
    start = time.perf_counter()
    constraints = constraints or Constraints()
    if workload is None and prices is None and len(constraints.recipes) > 1:
        return _fastest_recipes(
            captured, cluster, constraints, batch_size=batch_size, samples=samples, known=known, report=report
        )
    batches = captured.batch_size // (batch_size or captured.batch_size)
    constraints = spread_experts(constraints, cluster.num_gpus)
    constraints.check(cluster.num_gpus, captured.batch_size // batches)
    constraints = _of_stack(constraints, cluster.device.stack)
    if prices is not None:
        workload = prices.workload
    elif workload is None:
        (recipe,) = constraints.recipes
        workload = _workload(captured, constraints, recipe)
    elif constraints.expert_capacity is not None:
        analysis = Analysis.of(captured, constraints.expert_capacity, workload.analysis.recipes)
        workload = Workload(analysis=analysis, precision=constraints.precision)
    _check_precision(workload, cluster)
    _check_microbatches(workload, constraints)
    _check_experts(workload, constraints)
    _check_expert_load(workload, constraints)
    check_annotations(workload, constraints)
    axes = constraints.pinned_axes() if constraints.axes is None else constraints.axes
    check_forbidden(workload, constraints.forbidden, tuple(axis.name for axis in axes))
    solver = Solver(
        prices=prices or prices_of(workload, cluster, constraints),
        budget_bytes=cluster.device.usable_bytes * constraints.memory_share,
        levels=constraints.levels,
        saved_bytes=inf if constraints.activation_memory is None else constraints.activation_memory,
        batches=batches,
    )
    tried: list[tuple[Configuration, Inner]] = []
    refusal: NoOption | None = None
    offloaded: Candidate | None = None
    for offload in offloads(constraints.offload, cluster.device):
        outer = Outer(solver=solver, constraints=constraints, offload=offload, known=known, report=report)
        with nullcontext() if known else solver.ahead.help():
            outer.run()
        best = outer.final()
        if best is not None and has_room(best):
            break
        offloaded, best = best or offloaded, None
        tried += outer.closest
        refusal = refusal or outer.refusal
        solver.work = 0
    if best is None and offloaded is not None:
        raise no_room(offloaded)
    if best is None:
        raise refusal if refusal is not None and not tried else explain(solver, constraints, tried)
    best = best_order(solver, best, outer.candidates)
    best = with_larger_microbatches(solver, best_kept(solver, best, () if outer.known else outer.candidates))
    best = refine(solver, best, best.step_time_s if outer.is_small else outer.baseline_s)
    shape = best.configuration.pipelining
    plan = plan_of(best.pricing, best.assignment, best.stages, shape, best.predicted, samples=samples)
    step = best.predicted.step_time_s
    return SearchResult(
        plan=plan.model_copy(update={"expert_capacity": constraints.expert_capacity}),
        predicted=best.predicted,
        optimality_gap=max(0.0, 1.0 - _bound_s(outer) / step),
        num_configurations=solver.num_solved,
        num_skipped=outer.num_skipped,
        search_time_s=time.perf_counter() - start,
        baselines=_baselines(outer),
        interrupted=outer.interrupted,
        candidates=tuple(outer.candidates),
        workload=workload,
        cluster=cluster,
        constraints=constraints,
    )


def _workload(captured: CapturedModel, constraints: Constraints, recipe: Recipe | None) -> Workload:
    """The model with one recipe for its products, but for those that are pinned."""
    return Workload.of(
        captured, constraints.precision, constraints.expert_capacity, recipe, pins=constraints.recipe_pins
    )


def _fastest_recipes(
    captured: CapturedModel,
    cluster: Cluster,
    constraints: Constraints,
    *,
    batch_size: int | None,
    samples: int | None,
    known: Sequence[Known],
    report: Callable[[Progress], object],
) -> SearchResult:
    """The fastest of the plans that each recipe gives, and of one with the fastest for each product."""
    found: list[SearchResult] = []
    refusal: InfeasiblePlan | None = None
    start = time.perf_counter()
    for recipe in constraints.recipes:
        try:
            own = replace(constraints, recipes=(recipe,))
            found.append(
                search_captured(
                    captured, cluster, own, batch_size=batch_size, samples=samples, known=known, report=report
                )
            )
        except InfeasiblePlan as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None, "there is a recipe"
        raise refusal
    best = min(found, key=lambda own: own.predicted.step_time_s)
    pricing, assignment, _ = priced_plan(captured, cluster, best.plan, workload=best.workload)
    others = {
        recipe: prices_of(_workload(captured, constraints, recipe), cluster, constraints)
        for recipe in constraints.recipes
    }
    recipes = fastest_for_each(captured, pricing, assignment, others)
    if recipes != best.workload.analysis.recipes:
        analysis = Analysis.of(captured, constraints.expert_capacity, recipes)
        mixed = Workload(analysis=analysis, precision=constraints.precision)
        prices = prices_of(mixed, cluster, constraints)
        with suppress(InfeasiblePlan):  # then it is one recipe for all
            other = search_captured(
                captured, cluster, constraints, prices=prices, batch_size=batch_size, samples=samples, known=known,
                report=report,
            )  # fmt: skip
            best = min(best, other, key=lambda own: own.predicted.step_time_s)
    return replace(best, search_time_s=time.perf_counter() - start)


def _of_stack(constraints: Constraints, stack: Stack) -> Constraints:
    """``constraints`` with those of its schedules that ``stack`` has. Raises InfeasiblePlan if there are none."""
    left = tuple(name for name in constraints.schedules if name in stack.schedules)
    if not left:
        raise InfeasiblePlan(
            f"schedules: {', '.join(constraints.schedules)}; the stack {stack.name} has none of them.\n"
            f"  try: some of {', '.join(stack.schedules)}"
        )
    return replace(constraints, schedules=left)


def _check_precision(workload: Workload, cluster: Cluster) -> None:
    """Raise InvalidCluster if products are to be by a recipe on a device that has no units for it."""
    device = cluster.device
    for recipe in sorted(set(workload.analysis.recipes.values())):
        rate = SCALINGS[recipe].rate
        if rate not in device.precisions:
            able = [own for own, scaling in SCALINGS.items() if scaling.rate in device.precisions]
            raise InvalidCluster(
                f"{device.name} has no units for the products of {recipe}; it has rates for "
                f"{', '.join(device.precisions)}.\n  try: --precision {' or '.join([workload.precision, *able])}, or a "
                f"device with a rate for {rate} (in a cluster file: rates: {{{rate}: ...}})"
            )


def prices_of(workload: Workload, cluster: Cluster, constraints: Constraints) -> Prices:
    """Prices that searches under ``constraints`` share. Raises InfeasiblePlan."""
    balanced = _balanced(workload, constraints)
    return Prices(workload, cluster, balanced, constraints.expert_load, constraints.documents)


def _baselines(outer: Outer) -> tuple[Baseline, ...]:
    found = [
        Baseline(
            name=name,
            configuration=str(configuration),
            step_time_s=outcome.least_s if outcome.least_s < inf else None,
            at_least=outcome.step_time_s is None,
        )
        for name, (configuration, outcome) in outer.baselines.items()
    ]
    return tuple(sorted(found, key=lambda own: (own.step_time_s or inf, own.name)))


def estimate_captured(
    captured: CapturedModel,
    cluster: Cluster,
    constraints: Constraints | None = None,
    *,
    workload: Workload | None = None,
    prices: Prices | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    known: Sequence[Known] = (),
    report: Callable[[Progress], object] = lambda progress: None,
) -> SearchResult:
    """The prediction with every degree pinned: degrees not given are 1, and dp takes the ranks left over.

    The schedule is 1F1B, interleaved if there are virtual stages. The number of microbatches, ZeRO and
    rematerialisation are the best ones unless given. For the other arguments see ``search_captured``.
    """
    constraints = constraints or Constraints()
    if constraints.schedule is None:
        constraints = replace(constraints, schedule="interleaved" if (constraints.virtual_stages or 1) > 1 else "1f1b")
    constraints = spread_experts(constraints, cluster.num_gpus)
    constraints.check(cluster.num_gpus, batch_size or captured.batch_size)
    if constraints.axes is None:
        pp, tp, cp, ep = (getattr(constraints, name) or 1 for name in ("pp", "tp", "cp", "ep"))
        ranks = pp * tp * cp * ep
        dp = constraints.dp or max(1, cluster.num_gpus // ranks)
        if dp * ranks != cluster.num_gpus:
            raise InfeasiblePlan(
                f"dp={dp} * pp={pp} * tp={tp} * cp={cp} * ep={ep} make {dp * ranks} ranks; there are "
                f"{cluster.num_gpus}.\n  try: --dp {max(1, cluster.num_gpus // ranks)}"
            )
        constraints = replace(constraints, pp=pp, dp=dp, tp=tp, cp=cp, ep=ep)
    return search_captured(
        captured,
        cluster,
        constraints,
        workload=workload,
        prices=prices,
        batch_size=batch_size,
        samples=samples,
        known=known,
        report=report,
    )


def predict_plan(
    captured: CapturedModel,
    cluster: Cluster,
    plan: Plan,
    *,
    workload: Workload | None = None,
    prices: Prices | None = None,
    documents: Documents | None = None,
) -> Predicted:
    """The prediction for a plan, for instance one edited by hand.

    captured: of its batch, or of a multiple of that. prices: of the model, with its sequence in the plan's layout.
    documents: of a row, if they are packed; of ``prices``, if those are given.
    """
    pricing, assignment, stages = priced_plan(
        captured, cluster, plan, workload=workload, prices=prices, documents=documents
    )
    priced = evaluate_stages(pricing, assignment, stages)
    return predict(pricing, assignment, priced, stages, plan.pipelining)


def priced_plan(
    captured: CapturedModel,
    cluster: Cluster,
    plan: Plan,
    *,
    workload: Workload | None = None,
    prices: Prices | None = None,
    documents: Documents | None = None,
) -> tuple[Pricing, tuple[Assignment, ...], list[Stage]]:
    """A plan in the terms of the search: prices of its configuration, assignment of every cluster's leader, stages."""
    if prices is None:
        workload = workload or Workload.for_plan(captured, plan)
        prices = Prices(workload, cluster, plan.sequence_layout == "zigzag", documents=documents)
    workload, (batches, rest) = prices.workload, divmod(captured.batch_size, plan.planned_rows)
    solver = Solver(prices=prices, budget_bytes=float("inf"), batches=1 if rest else batches)
    check_choices(workload.analysis, plan)
    assignment = assignment_of(workload.analysis, plan)
    configuration = Configuration(
        num_stages=plan.num_pipeline_ranks,
        mesh=plan.stage_mesh,
        num_microbatches=plan.batch.num_microbatches,
        zero=plan.zero,
        data_axes=(),
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        constraints=Constraints(),
    )
    plain = evaluate(solver.pricing(configuration), assignment, shared_once=plan.num_stages == 1)
    if plan.zero:
        data_axes = data_axes_of(plain, assignment[workload.clusters.inputs.index])
        if plan.shard_axes is not None:
            data_axes = tuple(sorted(plan.stage_mesh.index(name) for name in set(plan.shard_axes)))
        configuration = replace(configuration, data_axes=data_axes)
    kinds = range(len(plan.blocks))
    pricing = replace(
        solver.pricing(configuration),
        prefetch=plan.prefetch,
        reshard=plan.reshard_after_forward,
        zero_stages=tuple(plan.zero_of(kind) for kind in kinds),
        reshards=tuple(plan.reshards(kind) for kind in kinds),
        kept=sets_of(plan),
    )
    levels = level_names(pricing.kept)
    stages = [
        Stage(
            first=s.first,
            last=s.last,
            remat=tuple((levels.index(name), count) for name, count in s.remat_counts),
            offload=s.offload,
            on_disk=s.on_disk or 0,
        )
        for s in plan.stages
    ]
    return pricing, assignment, stages


def _bound_s(outer: Outer) -> float:
    """Lower bound on a step of every plan: that of the search, which has levels of rematerialisation alone, or where
    activations may wait in host memory one without recomputation."""
    if not outer.solver.cluster.device.may_keep_on_host:
        return outer.bound
    partials = [
        (num_stages, num)
        for num_stages, mesh in outer.space.nodes()
        for num in outer.space.microbatches(mesh, outer.constraints)
    ]
    return min(outer.bound, *(outer.bounds.ideal_s(*partial, on_host=True) for partial in partials))


def _check_microbatches(workload: Workload, constraints: Constraints) -> None:
    count = constraints.num_microbatches
    if count is not None and count > 1 and workload.analysis.obstacle is not None:
        raise InfeasiblePlan(
            f"the batch cannot be cut into {count} microbatches: {workload.analysis.obstacle}\n"
            "  try: --num-microbatches 1"
        )


def _check_experts(workload: Workload, constraints: Constraints) -> None:
    degree = prod(constraints.degree(role) or 1 for role in ("ep", *constraints.experts_within))
    if degree == 1:
        return
    counts = {workload.rule(node).sizes[factor] for node, own in workload.expert_factors.items() for factor in own}
    if not counts:
        raise InfeasiblePlan(f"ep={degree}: {workload.captured.name} has no experts to divide.\n  try: --ep 1")
    if all(count % degree for count in counts):
        raise InfeasiblePlan(
            f"ep={degree} does not divide the {' or '.join(map(str, sorted(counts)))} experts of a layer of "
            f"{workload.captured.name}.\n  try: --ep {gcd(degree, *counts)}"
        )


def _check_expert_load(workload: Workload, constraints: Constraints) -> None:
    given = {len(rows) for rows in constraints.expert_load}
    if not given <= workload.experts:
        found, has = (" and ".join(map(str, sorted(counts))) or "no" for counts in (given, workload.experts))
        raise InfeasiblePlan(
            f"expert_load has layers of {found} experts; those of {workload.captured.name} have {has} experts.\n"
            "  try: what expert_load() of this model counted"
        )


def _balanced(workload: Workload, constraints: Constraints) -> bool:
    """Whether sequences that ranks share are in zigzag layout: where they can be, unless asked otherwise."""
    if constraints.sequence_layout == "contiguous":
        return False
    obstacle = workload.analysis.zigzag.obstacle
    if obstacle is not None and constraints.sequence_layout == "zigzag":
        raise InfeasiblePlan(
            f"{workload.captured.name} cannot be run with its sequence in zigzag order: {obstacle}.\n"
            "  try: --sequence-layout contiguous"
        )
    degree, zigzag = constraints.degree("cp") or 1, workload.analysis.zigzag
    if constraints.sequence_layout == "zigzag" and degree > 1 and not zigzag.divides(degree):
        raise InfeasiblePlan(
            f"a sequence of {zigzag.length} on cp={degree} ranks has no zigzag order: ranks take equal chunks, so the "
            f"length has to divide by {zigzag.divisor(degree)}.\n  try: another --cp or --seq, or "
            "--sequence-layout contiguous"
        )
    return obstacle is None
