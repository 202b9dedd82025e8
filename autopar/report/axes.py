"""The role of each mesh axis and the ranks that it joins: the picture of the cluster."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.cost_model.catalogue import catalogued_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.topology import axis_link, send_link
from autopar.ir.errors import AutoparError
from autopar.ir.plan import Plan

# Nodes that are drawn one by one; ops that are named for a factor.
_MAX_NODES, _MAX_OPS = 16, 3


def axes(plan: Plan, cluster: Cluster | None = None) -> list[dict[str, Any]]:
    """The pipeline, if there is one, and every mesh axis, outermost first.

    ``stride``: from a rank to its neighbour on the axis. ``num_nodes``: of a group. ``uses``: factors that ops are
    divided along, those of most ops first, with some of the ops. ``link``: what rings along the axis, or sends between
    stages, wait for while all groups communicate, with the bytes/s that a rank gets; None without a cluster.
    """
    found = []
    size, links = plan.stage_mesh.size, {} if cluster is None else _links(plan, cluster)
    if plan.num_pipeline_ranks > 1:
        found.append(_axis(plan, "pp", plan.num_pipeline_ranks, size, [], pipeline=True))
    for name, own in plan.mesh.items():
        size //= own
        found.append(_axis(plan, name, own, size, _uses(plan, name)))
    return [{**axis, "link": links.get(axis["name"])} for axis in found]


def catalogued(plan: Plan) -> Cluster | None:
    """The cluster of a plan, if the catalogue knows its GPU and it has one for each rank."""
    try:
        cluster = catalogued_cluster(plan.cluster)
    except AutoparError:
        return None
    return cluster if plan.num_ranks <= cluster.num_gpus else None


def _links(plan: Plan, cluster: Cluster) -> dict[str, dict[str, Any]]:
    mesh, stages = plan.stage_mesh, plan.num_pipeline_ranks
    found = {
        name: axis_link(cluster, mesh, [number], stages)
        for number, (name, size) in enumerate(plan.mesh.items())
        if size > 1
    }
    if stages > 1:
        sends = (send_link(cluster, mesh, stage, stage + 1) for stage in range(stages - 1))
        found["pp"] = min(sends, key=lambda link: link.bandwidth)
    return {name: link._asdict() for name, link in found.items()}


def cluster_picture(plan: Plan) -> dict[str, Any]:
    """The first nodes with the place of each of their ranks on every axis."""
    per_node = min(plan.cluster.gpus_per_node, plan.num_ranks)
    num_nodes = -(-plan.num_ranks // per_node)
    names = [axis["name"] for axis in axes(plan)]
    shown = min(num_nodes, _MAX_NODES)
    return {
        "axes": names,
        "num_nodes": num_nodes,
        "nodes": [
            [
                {"rank": rank, "places": _places(plan, rank)}
                for rank in range(first, min(first + per_node, plan.num_ranks))
            ]
            for first in range(0, shown * per_node, per_node)
        ],
    }


def _places(plan: Plan, rank: int) -> list[int]:
    sizes = ([plan.num_pipeline_ranks] if plan.num_pipeline_ranks > 1 else []) + list(plan.mesh.values())
    found = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return found[::-1]


def _axis(
    plan: Plan, name: str, size: int, stride: int, uses: list[dict[str, Any]], *, pipeline: bool = False
) -> dict[str, Any]:
    group = [number * stride for number in range(size)]
    return {
        "name": name,
        "size": size,
        "stride": stride,
        "num_nodes": len({rank // plan.cluster.gpus_per_node for rank in group}),
        "pipeline": pipeline,
        "divides_inputs": name in plan.inputs,
        "shards": plan.zero > 0 and name in (plan.inputs if plan.shard_axes is None else plan.shard_axes),
        "uses": uses,
    }


def _uses(plan: Plan, axis: str) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    ops: dict[str, list[str]] = {}
    for block in plan.blocks:
        for key, chosen in block.ops.items():
            if axis in chosen:
                counts[chosen[axis]] += block.repeats
                ops.setdefault(chosen[axis], []).append(key)
    return [
        {"factor": factor, "num_ops": count, "ops": ops[factor][:_MAX_OPS], "more": len(ops[factor]) > _MAX_OPS}
        for factor, count in counts.most_common()
    ]
