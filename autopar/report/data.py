"""What a report shows, as one JSON-ready mapping made from a plan and, where there is one, the search's result.

The page and the terminal view read this and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.cost_model.simulator import Timeline, simulate
from autopar.ir.plan import BlockPlan, Plan, StagePlan

if TYPE_CHECKING:
    from autopar.planning import Planned

Json = Any
"""What ``json.dumps`` takes."""


def report_data(plan: Plan, planned: Planned | None = None) -> dict[str, Json]:
    """The contents of a report.

    Without the search's result the timeline is simulated again from the stage times in the plan's prediction.
    """
    timeline = _timeline(plan, planned)
    return {
        "model": plan.model.name,
        "fingerprint": plan.model.fingerprint,
        "cluster": plan.cluster.model_dump(),
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
        "precision": plan.precision,
        "remat": remat_level(plan),
        "prediction": None if plan.prediction is None else plan.prediction.model_dump(),
        "blocks": [_block(plan, number) for number in range(len(plan.blocks))],
        "stages": [_stage(plan, number) for number in range(plan.num_stages)],
        "timeline": None if timeline is None else _timeline_data(timeline),
        "search": None if planned is None else _search_data(planned),
    }


def schedule_words(plan: Plan) -> str:
    """The schedule, with the stages of a rank where they are several."""
    return plan.schedule + (f", {plan.virtual_stages} stages a rank" if plan.virtual_stages > 1 else "")


def microbatch_size(plan: Plan) -> int:
    """Samples of one microbatch on one data-parallel rank."""
    return plan.batch.global_size // (plan.batch.num_microbatches * plan.data_parallel_size)


def remat_level(plan: Plan) -> str:
    """The rematerialisation of the whole plan in a word: ``none``, ``selective``, ``full`` or ``mixed``."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        rest = stage.last - stage.first + 1
        for level, count in stage.remat.items():
            counts[level] = counts.get(level, 0) + count
            rest -= count
        counts["none"] = counts.get("none", 0) + rest
    used = [level for level, count in counts.items() if count]
    return used[0] if len(used) == 1 else "mixed"


def block_names(plan: Plan) -> list[str]:
    """One name per block instance, in order: the distinct block's, with the repeat's number for ``*``."""
    names: list[str] = []
    for block in plan.blocks:
        for repeat in range(block.repeats):
            if "*" in block.name:
                names.append(block.name.replace("*", str(repeat), 1))
            else:
                names.append(block.name if block.repeats == 1 else f"{block.name} {repeat}")
    return names


def _block(plan: Plan, number: int) -> dict[str, Json]:
    block = plan.blocks[number]
    first = sum(b.repeats for b in plan.blocks[:number])
    return {
        "name": block.name,
        "repeats": block.repeats,
        "first": first,
        "last": first + block.repeats - 1,
        "groups": _op_groups(block),
    }


def _op_groups(block: BlockPlan) -> list[dict[str, Json]]:
    """Ops under their module path, in order of appearance.

    A module without modules inside it (a projection) is listed in the one around it: ``self_attn.q_proj/linear``
    and ``self_attn/attention`` both under ``self_attn``.
    """
    paths = {key.rpartition("/")[0] for key in block.ops}
    around = {path.rpartition(".")[0] for path in paths}
    groups: dict[str, list[dict[str, Json]]] = {}
    for key, axes in block.ops.items():
        path, _, op = key.rpartition("/")
        module, _, leaf = (path, "", "") if path in around else path.rpartition(".")
        shown = f"{leaf}/{op}" if leaf else op
        groups.setdefault(module, []).append({"key": key, "label": shown, "axes": dict(axes)})
    # Ops of the block itself first: there is no heading that would end the module before them.
    ordered = sorted(groups.items(), key=lambda group: group[0] != "")
    return [{"module": module, "ops": ops} for module, ops in ordered]


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
    }


def _remat_of(stage: StagePlan) -> dict[str, int]:
    counts = {str(level): count for level, count in stage.remat.items() if count}
    rest = stage.last - stage.first + 1 - sum(counts.values())
    return {**counts, **({"none": rest} if rest else {})}


def _timeline(plan: Plan, planned: Planned | None) -> Timeline | None:
    if planned is not None:
        return planned.result.predicted.timeline
    prediction = plan.prediction
    if prediction is None or len(prediction.stage_forward_s) != plan.num_stages:
        return None
    split = (prediction.stage_inputs_s, prediction.stage_weights_s) if prediction.stage_inputs_s else None
    return simulate(plan.pipelining, prediction.stage_forward_s, prediction.stage_backward_s, split)


def _timeline_data(timeline: Timeline) -> dict[str, Json]:
    return {
        "step_time_s": timeline.step_time_s,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_live": list(timeline.peak_live),
        "events": [[[*event.action, event.start_s, event.end_s] for event in rank] for rank in timeline.events],
    }


def _search_data(planned: Planned) -> dict[str, Json]:
    return {
        "capture_time_s": planned.capture_time_s,
        "search_time_s": planned.result.search_time_s,
        "optimality_gap": planned.result.optimality_gap,
        "num_configurations": planned.result.num_configurations,
        "num_skipped": planned.result.num_skipped,
        "interrupted": planned.result.interrupted,
    }
