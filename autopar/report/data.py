"""The data of a report, as JSON-ready mappings made from a plan and, where its model is at hand, a study of it.

The page reads this and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.ir.plan import Plan, StagePlan
from autopar.planning import Planned
from autopar.report.axes import axes, catalogued, cluster_picture
from autopar.report.candidates import candidates
from autopar.report.divided import divided_data
from autopar.report.listing import Row, listings, plain_listing
from autopar.report.sensitivity import Variation
from autopar.report.streams import hidden_s, memory_over_step, steps_of_passes, steps_of_streams
from autopar.report.study import Study
from autopar.report.timeline import timeline_of
from autopar.report.whereabouts import held_at_peak, sequence_data
from autopar.report.words import (
    block_names,
    counted,
    microbatch_size,
    node_words,
    one_line,
    remat_level,
    schedule_words,
)
from autopar.search.divided_share import divided_by_axes

Json = Any
"""What ``json.dumps`` takes."""


def report_data(plan: Plan, study: Study | None = None) -> dict[str, Json]:
    """The contents of a report. study: of ``plan``, with what the plan file does not keep."""
    rows = [plain_listing(block) for block in plan.blocks] if study is None else listings(study)
    planned = None if study is None else study.planned
    prediction = plan.prediction
    return {
        "model": plan.model.name,
        "fingerprint": plan.model.fingerprint,
        "cluster": {**plan.cluster.model_dump(), "node": node_words(plan.cluster)},
        "batch": plan.batch.model_dump(),
        "microbatch_size": microbatch_size(plan),
        "mesh": dict(plan.mesh),
        "data_axes": list(plan.inputs),
        "num_stages": plan.num_stages,
        "num_pipeline_ranks": plan.num_pipeline_ranks,
        "num_ranks": plan.num_ranks,
        "schedule": schedule_words(plan),
        "sequence_layout": plan.sequence_layout,
        "zero": plan.zero,
        "shard_axes": plan.shard_axes,
        "precision": plan.precision_words,
        "remat": remat_level(plan),
        "words": one_line(plan),
        "prediction": None if prediction is None else prediction.model_dump(),
        "capacity_bytes": _capacity_bytes(plan) if study is None else study.capacity_bytes,
        "axes": axes(plan, catalogued(plan) if study is None else study.cluster),
        "divided": {}
        if study is None
        else divided_data(divided_by_axes(study.workload.captured, plan, workload=study.workload)),
        "picture": cluster_picture(plan),
        "sequence": sequence_data(plan),
        "held": [] if study is None else [asdict(one) for one in held_at_peak(plan, study.pricing, study.assignment)],
        "blocks": [_block(plan, number, own) for number, own in enumerate(rows)],
        "stages": [_stage(plan, number) for number in range(plan.num_stages)],
        "counted": counted(plan),
        "with_collectives": study is not None,
        "hidden_s": {} if study is None else hidden_s(study),
        "candidates": [] if planned is None else candidates(planned.result),
        "variations": [] if study is None else [_variation(one) for one in study.variations],
        "search": None if planned is None else _search_data(planned),
    }


def step_data(plan: Plan, study: Study | None = None) -> dict[str, Json]:
    """One predicted step over time: ``streams`` of each rank of the pipeline and, with a study, its ``memory``."""
    if study is not None:
        return {"streams": steps_of_streams(study), "memory": memory_over_step(study)}
    timeline = timeline_of(plan)
    return {"streams": None if timeline is None else steps_of_passes(timeline), "memory": []}


def _block(plan: Plan, number: int, rows: list[Row]) -> dict[str, Json]:
    block = plan.blocks[number]
    first = sum(b.repeats for b in plan.blocks[:number])
    return {
        "name": block.name,
        "repeats": block.repeats,
        "first": first,
        "last": first + block.repeats - 1,
        "rows": rows,
        "kept": block.kept,
        "host": block.host or {},
    }


def _stage(plan: Plan, number: int) -> dict[str, Json]:
    stage = plan.stages[number]
    per_stage, rank = plan.stage_mesh.size, plan.pipelining.rank_of(number)
    prediction = plan.prediction
    names = block_names(plan)

    def of(values: Sequence[Any], place: int = number) -> Any:
        return values[place] if place < len(values) else None

    return {
        "number": number,
        "first_rank": rank * per_stage,
        "last_rank": (rank + 1) * per_stage - 1,
        "first_block": stage.first,
        "last_block": stage.last,
        "num_blocks": stage.last - stage.first + 1,
        "from": names[stage.first],
        "to": names[stage.last],
        "remat": _remat_of(stage),
        "forward_s": prediction and of(prediction.stage_forward_s),
        "backward_s": prediction and of(prediction.stage_backward_s),
        "memory_bytes": prediction and of(prediction.stage_memory_bytes, rank),
        "memory_parts_bytes": prediction and of(prediction.memory_parts_bytes, rank),
        "host_bytes": prediction and of(prediction.stage_host_bytes or (), rank),
    }


def _remat_of(stage: StagePlan) -> dict[str, int]:
    counts = {str(level): count for level, count in stage.remat.items() if count}
    rest = stage.last - stage.first + 1 - sum(counts.values())
    return {**counts, **({"none": rest} if rest else {})}


def _capacity_bytes(plan: Plan) -> float | None:
    """Memory of a rank that a plan may take, if the catalogue knows its GPU."""
    cluster = catalogued(plan)
    return None if cluster is None else cluster.device.usable_bytes


def _search_data(planned: Planned) -> dict[str, Json]:
    result = planned.result
    return {
        "capture_time_s": planned.capture_time_s,
        "search_time_s": result.search_time_s,
        "optimality_gap": result.optimality_gap,
        "num_configurations": result.num_configurations,
        "num_skipped": result.num_skipped,
        "interrupted": result.interrupted,
        "baselines": [
            {
                "name": one.name,
                "configuration": one.configuration,
                "step_time_s": one.step_time_s,
                "at_least": one.at_least,
            }
            for one in result.baselines
        ],
    }


def _variation(one: Variation) -> dict[str, Json]:
    prediction = None if one.plan is None else one.plan.prediction
    return {
        "what": one.what,
        "words": None if one.plan is None else one_line(one.plan),
        "step_time_s": None if prediction is None else prediction.step_time_s,
        "tokens_per_s_per_gpu": None if prediction is None else prediction.tokens_per_s_per_gpu,
        "peak_memory_bytes": None if prediction is None else prediction.peak_memory_bytes,
        "reason": one.reason,
    }
