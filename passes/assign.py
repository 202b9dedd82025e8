"""From a plan to the assignment of every op.

A plan names the factors of leading ops of distinct blocks. Followers, repeats of a block, the prelude and the
step inputs are completed from them.
"""

from __future__ import annotations

import difflib
import operator

from torch import fx

from autopar.ir.analysis.blocks import Folding
from autopar.ir.analysis.op_clusters import BATCH, Cluster, Clusters, first_instances
from autopar.ir.errors import InvalidPlan, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.mesh import Mesh
from autopar.ir.plan import BlockPlan, Plan
from autopar.ir.rule import Assignment, Choice
from autopar.ir.rules import rule_for


def assign(captured: CapturedModel, folding: Folding, clusters: Clusters, plan: Plan) -> dict[fx.Node, Assignment]:
    """The assignment of every op of ``captured`` under ``plan``, on ``plan.stage_mesh``.

    Raises PlanMismatch if the plan was made for another model, InvalidPlan if it names an op that does not
    exist or follows another, or a factor that the op cannot be sharded on.
    """
    check_model(captured, folding, plan)
    mesh = plan.stage_mesh
    assignments: dict[fx.Node, Assignment] = {}

    inputs: tuple[Choice, ...] = tuple(BATCH if name in plan.inputs else None for name in mesh.names)
    _spread(clusters.inputs, inputs, mesh, assignments, "the step inputs")

    for kind, index in enumerate(first_instances(folding)):
        block = folding.blocks[index]
        stated = plan.blocks[kind]
        leaders = {
            folding.key[node]: clusters.of[node]
            for node in block.nodes
            if node in clusters.of and clusters.of[node].leader is node
        }
        _check_keys(stated, leaders, folding, block.nodes, clusters)
        for key, led in leaders.items():
            possible = ", ".join(c for c in led.choices if c) or "none; leave the op out"
            factors = stated.ops.get(key, {})
            choice: Assignment = tuple(factors.get(name) for name in mesh.names)
            for name, value in zip(mesh.names, choice, strict=True):
                if value not in led.choices:
                    raise InvalidPlan(
                        f"plan: op {key!r} of block {stated.name!r} cannot be sharded on factor {value!r} (mesh axis "
                        f"{name!r}).\n  expected one of: {possible}"
                    )
            _spread(led, choice, mesh, assignments, f"op {key!r} of block {stated.name!r}")

    for node, first in folding.representative.items():
        if node.op == "call_function" and node.target is not operator.getitem:
            assignments[node] = assignments[first]
    return assignments


def check_model(captured: CapturedModel, folding: Folding, plan: Plan) -> None:
    """Raise PlanMismatch unless ``plan`` was made for this model."""
    names = [kind.name for kind in folding.kinds]
    stated = [block.name for block in plan.blocks]
    repeats = [kind.repeats for kind in folding.kinds]
    same_blocks = stated == names and [block.repeats for block in plan.blocks] == repeats
    if same_blocks and plan.model.fingerprint == captured.fingerprint:
        return
    raise PlanMismatch(
        f"the plan was made for another model: {plan.model.name!r} with blocks "
        f"{_listing(stated, [b.repeats for b in plan.blocks])}; this is {captured.name!r} with blocks "
        f"{_listing(names, repeats)}.\n  fingerprint: the plan has {plan.model.fingerprint}, this model and its "
        f"example inputs have {captured.fingerprint}\n  try: search a new plan, or pass the model and the example "
        "input shapes that the plan was made for"
    )


def _listing(names: list[str], repeats: list[int]) -> str:
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in zip(names, repeats, strict=True))


def _spread(led: Cluster, choice: Assignment, mesh: Mesh, assignments: dict[fx.Node, Assignment], what: str) -> None:
    """Enter the assignment of every member, checking that sizes divide."""
    for member in led.members:
        own = led.assignment(member, choice)
        rule = rule_for(member)
        if not rule.allows(own, mesh):
            sizes = {f: rule.sizes[f] for f in own if f is not None and f in rule.sizes}
            raise InvalidPlan(
                f"plan: {what} does not divide on mesh {mesh}: {member.format_node() or member.name} has factor sizes "
                f"{sizes}, sharded as {dict(zip(mesh.names, own, strict=True))}.\n  expected sizes that are multiples "
                "of the product of the axes put on them\n  try: a smaller axis, or leave the op replicated on it"
            )
        assignments[member] = own


def _check_keys(
    stated: BlockPlan,
    leaders: dict[str, Cluster],
    folding: Folding,
    nodes: tuple[fx.Node, ...],
    clusters: Clusters,
) -> None:
    every = {folding.key[node]: node for node in nodes}
    for key in stated.ops:
        if key in leaders:
            continue
        node = every.get(key)
        if node is not None and node in clusters.of:
            leader = clusters.of[node].leader
            assert leader is not None
            raise InvalidPlan(
                f"plan: op {key!r} of block {stated.name!r} follows {folding.key[leader]!r} and has no factors of its "
                f"own.\n  try: shard {folding.key[leader]!r} instead"
            )
        close = difflib.get_close_matches(key, leaders, n=3)
        raise InvalidPlan(
            f"plan: block {stated.name!r} has no op {key!r}.\n  did you mean: {', '.join(close) or ', '.join(leaders)}"
        )
