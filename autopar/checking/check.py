"""``autopar check``: does a plan run, do its ranks agree, and does it fit, found out without its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from autopar.checking.matching import mismatch
from autopar.checking.proof import ProvedRanks, prove_ranks
from autopar.checking.ranks import Programs, RankTrace, run_ranks
from autopar.checking.recorded import unrecorded
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import GIB
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.errors import InvalidInput, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.plan import Plan
from autopar.passes.partition import partition
from autopar.search.api import predict_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRank:
    """A rank that was run. predicted: its peak bytes by the cost model."""

    trace: RankTrace
    pipeline_rank: int
    stages: tuple[int, ...]
    predicted: MemoryParts

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the rank held at once."""
        return self.trace.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a check. problems: in words; empty if there is nothing wrong. budget_bytes: of a device.

    ranks: those that were run. proved: all ranks of the plan, by the programs that they run.
    """

    ranks: tuple[CheckedRank, ...]
    proved: tuple[ProvedRanks, ...]
    budget_bytes: float
    problems: tuple[str, ...]


def check_plan(
    build: Callable[[], nn.Module],
    captured: CapturedModel,
    plan: Plan,
    cluster: Cluster,
    *,
    ranks: Sequence[int] = (),
    programs: Programs | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Checked:
    """Run one rank of each place in the pipeline, and ``ranks``, on fake tensors; compare them and the prediction.

    build: makes the model. captured: of the same, with the plan's global batch. programs: of the stages, as a rank
    runs them; those that the passes make, if not given. Raises PlanMismatch, InvalidInput, or AutoparError where a
    program cannot run.
    """
    if not captured.has_loss:
        raise PlanMismatch(f"{captured.name} has no loss, so there is no training step to check.\n  try: loss_fn=...")
    wrong = [rank for rank in ranks if not 0 <= rank < plan.num_ranks]
    if wrong:
        raise InvalidInput(f"ranks {wrong}: the plan has ranks 0 to {plan.num_ranks - 1}")
    size = plan.stage_mesh.size
    chosen = sorted({*(rank * size for rank in range(plan.num_pipeline_ranks)), *ranks})
    progress("partitioning")
    placed = place_captured(captured, plan)
    made = partition(placed)
    programs = programs or (lambda rank: made)
    progress("proving the programs of all ranks")
    proved = prove_ranks(placed.captured, plan, programs)
    progress(f"running {len(chosen)} of {plan.num_ranks} ranks on fake tensors")
    traces = run_ranks(build, captured, plan, programs, chosen)
    memory = predict_plan(captured, cluster, plan).memory
    found = tuple(
        CheckedRank(
            trace=trace,
            pipeline_rank=trace.rank // size,
            stages=plan.pipelining.stages_of(trace.rank // size),
            predicted=memory[trace.rank // size],
        )
        for trace in traces
    )
    budget = float(cluster.device.usable_bytes)
    problems = [
        f"the programs of {len(own.ranks):,} of {plan.num_ranks:,} ranks (rank {own.ranks[0]} is the first) are not "
        f"proved: {own.problem}"
        for own in proved
        if own.problem is not None
    ]
    communication = step_communication(placed, traces[0].num_microbatches)
    problems += [
        f"rank {trace.rank} sends what the plan does not record: {text}"
        for trace in traces
        for text in unrecorded(trace, placed, communication)[:3]
    ]
    unmatched = mismatch(traces, plan)
    if unmatched is not None:
        problems.append(f"communications do not fit together: {unmatched}")
    problems += [
        f"rank {own.trace.rank} is out of memory: it holds {own.peak_bytes / GIB:.1f} GiB at once, a "
        f"{cluster.device.name} has {budget / GIB:.1f} GiB to use.\n  try: more microbatches, rematerialisation, or "
        "autopar search for another plan"
        for own in found
        if own.peak_bytes > budget
    ]
    return Checked(ranks=found, proved=proved, budget_bytes=budget, problems=tuple(problems))
