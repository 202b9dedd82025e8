"""What a report shows, as one JSON-ready mapping made from a plan and, where there is one, the search's result.

The page and the terminal view read this and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from autopar.cost_model.simulator import Timeline, simulate
from autopar.ir.plan import BlockPlan, Plan, StagePlan

if TYPE_CHECKING:
    from autopar.search.result import SearchResult

Json = Any
"""What ``json.dumps`` takes."""


def report_data(plan: Plan, result: SearchResult | None = None) -> dict[str, Json]:
    """The contents of a report.

    Without a result the timeline is simulated again from the stage times in the plan's prediction, and there
    are no runners-up to show.
    """
    timeline = _timeline(plan, result)
    return {
        "model": plan.model.name,
        "fingerprint": plan.model.fingerprint,
        "cluster": plan.cluster.model_dump(),
        "batch": plan.batch.model_dump(),
        "microbatch_size": microbatch_size(plan),
        "mesh": dict(plan.mesh),
        "data_axes": list(plan.inputs),
        "num_stages": plan.num_stages,
        "num_ranks": plan.num_ranks,
        "schedule": plan.schedule,
        "zero": plan.zero,
        "precision": plan.precision,
        "remat": remat_level(plan),
        "prediction": None if plan.prediction is None else plan.prediction.model_dump(),
        "blocks": [_block(plan, number) for number in range(len(plan.blocks))],
        "stages": [_stage(plan, number) for number in range(plan.num_stages)],
        "timeline": None if timeline is None else _timeline_data(timeline),
        "search": None if result is None else _search_data(result),
    }


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
    """Ops under their module path (``self_attn.q_proj/linear`` under ``self_attn``), in order of appearance."""
    groups: dict[str, list[dict[str, Json]]] = {}
    for key, axes in block.ops.items():
        path, _, op = key.rpartition("/")
        module, _, leaf = path.rpartition(".")
        # An op that has a module to itself (a projection) is listed in the module around it.
        shown = f"{leaf}/{op}" if leaf else op
        groups.setdefault(module, []).append({"key": key, "label": shown, "axes": dict(axes)})
    return [{"module": module, "ops": ops} for module, ops in groups.items()]


def _stage(plan: Plan, number: int) -> dict[str, Json]:
    stage = plan.stages[number]
    per_stage = plan.stage_mesh.size
    prediction = plan.prediction
    names = block_names(plan)

    def of(values: Sequence[Any]) -> Any:
        return values[number] if number < len(values) else None

    return {
        "number": number,
        "first_rank": number * per_stage,
        "last_rank": (number + 1) * per_stage - 1,
        "first_block": stage.first,
        "last_block": stage.last,
        "num_blocks": stage.last - stage.first + 1,
        "from": names[stage.first],
        "to": names[stage.last],
        "remat": _remat_of(stage),
        "forward_s": prediction and of(prediction.stage_forward_s),
        "backward_s": prediction and of(prediction.stage_backward_s),
        "memory_bytes": prediction and of(prediction.stage_memory_bytes),
        "memory_parts_bytes": prediction and of(prediction.memory_parts_bytes),
    }


def _remat_of(stage: StagePlan) -> dict[str, int]:
    counts = {str(level): count for level, count in stage.remat.items() if count}
    rest = stage.last - stage.first + 1 - sum(counts.values())
    return {**counts, **({"none": rest} if rest else {})}


def _timeline(plan: Plan, result: SearchResult | None) -> Timeline | None:
    found = getattr(result, "timeline", None)
    if isinstance(found, Timeline):
        return found
    prediction = plan.prediction
    if prediction is None or len(prediction.stage_forward_s) != plan.num_stages:
        return None
    return simulate(
        plan.schedule, prediction.stage_forward_s, prediction.stage_backward_s, plan.batch.num_microbatches
    )


def _timeline_data(timeline: Timeline) -> dict[str, Json]:
    return {
        "step_time_s": timeline.step_time_s,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_live": list(timeline.peak_live),
        "events": [
            [[event.action.direction, event.action.microbatch, event.start_s, event.end_s] for event in stage]
            for stage in timeline.events
        ],
    }


def _search_data(result: SearchResult) -> dict[str, Json]:
    return {
        "capture_time_s": result.capture_time_s,
        "search_time_s": result.search_time_s,
        "optimality_gap": result.optimality_gap,
        "candidates": [_plain(candidate) for candidate in result.candidates],
    }


def _plain(row: object) -> dict[str, Json]:
    """A candidate as column -> plain value."""
    if is_dataclass(row) and not isinstance(row, type):
        row = asdict(row)
    assert isinstance(row, Mapping), f"a candidate is a mapping or a dataclass, got {type(row).__name__}"
    plain: dict[str, Json] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            plain[name] = " · ".join(f"{axis} {size}" for axis, size in value.items())
        elif value is None or isinstance(value, (bool, int, float, str)):
            plain[name] = value
        else:
            plain[name] = str(value)
    return plain
