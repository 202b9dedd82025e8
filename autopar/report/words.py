"""A plan in words."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autopar.ir.expert_axes import expert_axes
from autopar.ir.plan import ClusterRef, Plan
from autopar.units import plural


def one_line(plan: Plan) -> str:
    """A plan in a line: mesh, ZeRO, microbatches, schedule."""
    return line_of(plan.num_pipeline_ranks, plan.mesh, plan.zero, plan.batch.num_microbatches, plan.schedule)


def line_of(num_places: int, mesh: Mapping[str, int], zero: int, num_microbatches: int, schedule: str) -> str:
    """``one_line`` from its parts. num_places: ranks of the pipeline."""
    sizes = {"pp": num_places, **mesh}
    parts = [" ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank", f"ZeRO-{zero}"]
    parts.append(plural(num_microbatches, "microbatch", "microbatches"))
    return ", ".join(parts + [schedule] * (num_places > 1))


def experts_words(plan: Plan) -> str:
    """``experts over cp × ep (8 ranks)``, and where ranks have the same tokens, on which axes; "" without any."""
    axes = expert_axes(plan)
    if not axes:
        return ""
    ranks = prod(plan.mesh[axis] for axis in axes)
    copied = [axis for axis, dispatched in axes.items() if not dispatched]
    same = f", tokens not dispatched on {' × '.join(copied)}" if copied else ""
    return f"experts over {' × '.join(axes)} ({plural(ranks, 'rank')}{same})"


def node_words(cluster: ClusterRef) -> str:
    """Devices of a node, and where a part of a larger one was assumed, that it was."""
    words = f"{cluster.gpus_per_node} a node"
    return words if cluster.shares_nodes_of is None else f"{words} (assumed of each rack of {cluster.shares_nodes_of})"


def schedule_words(plan: Plan) -> str:
    """The schedule, with the stages of a rank where they are several."""
    return plan.schedule + (f", {plan.virtual_stages} stages a rank" if plan.virtual_stages > 1 else "")


def microbatch_size(plan: Plan) -> int:
    """Samples of the largest microbatch on one data-parallel rank."""
    return plan.planned_rows // (plan.batch.num_microbatches * plan.data_parallel_size)


def counted(plan: Plan) -> str:
    """Unit of a predicted step's throughput: ``tokens``, or ``samples`` of a model that reads none."""
    found = plan.prediction
    if found is None:
        return "tokens"
    per_step = found.tokens_per_s_per_gpu * plan.cluster.num_gpus * found.step_time_s
    return "samples" if round(per_step) == plan.batch.global_size else "tokens"


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
