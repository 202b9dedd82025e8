"""A plan with each set of tensors that its blocks may keep, on the device or in host memory."""

from __future__ import annotations

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.ir.kept_lists import INPUTS
from autopar.ir.plan import Plan
from autopar.search.api import priced_plan
from autopar.search.outer.kept_sets import kept_sets


def plans_that_keep(plan: Plan, captured: CapturedModel, cluster: Cluster) -> dict[str, Plan]:
    """Name of a set -> ``plan`` with all blocks at it, those that keep most first."""
    pricing, assignment, _ = priced_plan(captured, cluster, plan)
    found = {}
    for sets in kept_sets(pricing, assignment):
        blocks = [
            block.model_copy(update={"kept": {} if own is None else {sets.name: list(own)}})
            for block, own in zip(plan.blocks, sets.listed, strict=True)
        ]
        stages = [s.model_copy(update={"remat": {sets.name: s.last + 1 - s.first}}) for s in plan.stages]
        found[sets.name] = Plan.from_yaml(plan.model_copy(update={"blocks": blocks, "stages": stages}).to_yaml())
    return found


def on_host(plan: Plan) -> Plan:
    """``plan`` with everything in host memory that its blocks list to keep, and their inputs."""
    blocks = [
        block.model_copy(update={"host": {name: [*kept, INPUTS] for name, kept in block.kept.items()} or None})
        for block in plan.blocks
    ]
    return Plan.from_yaml(plan.model_copy(update={"blocks": blocks}).to_yaml())
