"""A distinct block as a listing: its ops in the order in which they run, collectives before the op that needs them."""

from __future__ import annotations

from typing import Any

from autopar.ir.analysis.op_clusters import first_instances
from autopar.ir.plan import BlockPlan
from autopar.report.axes import axes
from autopar.report.study import Study
from autopar.search.predict.communications import Communication, communications

Row = dict[str, Any]
"""Either an op or a collective, JSON-ready."""


def plain_listing(block: BlockPlan) -> list[Row]:
    """The ops that a plan names, without what they communicate."""
    return [_op(key, axes, block.ops) for key, axes in block.ops.items()]


def listings(study: Study) -> list[list[Row]]:
    """Listings of every distinct block, in the plan's order."""
    workload, plan = study.workload, study.plan
    found: list[list[Row]] = []
    moved = list(communications(study.pricing, study.assignment))
    for block, index in zip(plan.blocks, first_instances(workload.repetition), strict=True):
        place = {node: number for number, node in enumerate(workload.repetition.blocks[index].nodes)}
        rows: list[tuple[float, Row]] = []
        for node, number in place.items():
            key = workload.repetition.key[node]
            if key in block.ops:
                rows.append((number, _op(key, block.ops[key], block.ops)))
        for one in moved:
            numbers = [place[node] for node in one.readers if node in place]
            if numbers:
                # Before the op that needs it; what an op does inside it, after its head.
                rows.append((min(numbers) + (-0.5 if one.num_bytes is not None else 0.5), _collective(study, one)))
        found.append([*_sync(study, index), *(row for _, row in sorted(rows, key=lambda pair: pair[0]))])
    return found


def _sync(study: Study, index: int) -> list[Row]:
    """What the data axes do for a block's parameters: seconds of a microbatch and once a step, before any overlap."""
    block = study.predicted.costs.blocks[index]
    sync = block.sync.beside + block.sync.waited
    if not sync.total_s(study.plan.batch.num_microbatches):
        return []
    return [
        {
            "row": "sync",
            "axes": [axis["name"] for axis in axes(study.plan) if axis["divides_inputs"]],
            "forward_s": sync.forward_s,
            "backward_s": sync.backward_s,
            "step_s": sync.step_s,
        }
    ]


def _op(key: str, axes: dict[str, str], all_ops: dict[str, dict[str, str]]) -> Row:
    """A module without modules inside it (a projection) is listed in the one around it: ``self_attn.q_proj/linear`` and
    ``self_attn/attention`` both under ``self_attn``."""
    path, _, op = key.rpartition("/")
    around = {other.rpartition("/")[0].rpartition(".")[0] for other in all_ops}
    module, _, leaf = (path, "", "") if path in around else path.rpartition(".")
    return {"row": "op", "key": key, "module": module, "label": f"{leaf}/{op}" if leaf else op, "axes": dict(axes)}


def _collective(study: Study, one: Communication) -> Row:
    times = one.repeats * study.plan.batch.num_microbatches
    return {
        "row": "collective",
        "forward": one.forward,
        "backward": one.backward,
        "axes": one.axis.split(", "),
        "tensor": one.tensor,
        "users": list(one.users),
        "num_bytes": one.num_bytes,
        "forward_s": one.time.forward_s,
        "backward_s": one.time.backward_s,
        "times": times,
        "step_s": times * one.time.total_s,
    }
