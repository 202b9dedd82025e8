"""Communication inside ops that are sharded along a lowered factor.

A lowering computes on shards what its op cannot compute from shards alone; the collectives it needs are its own and no
redistribution shows them. Each lowering says which they are (``ir.lowered.inside``); here they get their seconds. Rows
that are dispatched to experts are put in order beside each all-to-all. What a ring sends hides behind compute
(``ring_attention``).
"""

from __future__ import annotations

from collections import Counter
from math import prod

from torch import fx

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.ring_attention import in_blocks, ring_time
from autopar.cost_model.compute.expert_imbalance import Loads, share_of_busiest
from autopar.cost_model.compute.op_time import OpTime
from autopar.ir.graph import tensor_operands
from autopar.ir.lowered.inside import LocalSizes
from autopar.ir.lowered.table import INSIDE, lowering_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import itemsize_of
from autopar.ir.redistribution import Collective
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice
from autopar.ir.rules.moe import EXPERTS

# Lowerings whose all-reduces are of maxima, for scales.
_SCALED = frozenset({"scales", "moe", "scaled_moe"})


def lowering_time(
    node: fx.Node,
    rule: FactorRule,
    assignment: Assignment,
    fabric: Fabric,
    *,
    precision: str = "fp32",
    batch_factor: str | None = None,
    num_microbatches: int = 1,
    balanced: bool = False,
    compute: OpTime | None = None,
    loads: Loads = (),
) -> OpTime:
    """Seconds of the collectives inside ``node`` for one microbatch.

    precision: of compute. balanced: sequences are in zigzag layout where that balances causal attention.
    compute: what collectives inside may hide behind. loads: tokens per expert, by layer; equal if not known.
    """
    if in_blocks(node, rule, assignment, fabric.mesh, balanced=balanced):
        return ring_time(
            node,
            rule,
            assignment,
            fabric,
            compute or OpTime(),
            precision=precision,
            balanced=balanced,
            batch_factor=batch_factor,
            num_microbatches=num_microbatches,
        )

    name = lowering_of(rule, assignment)
    if name not in INSIDE:
        return OpTime()
    mesh = fabric.mesh
    sizes = LocalSizes(
        assignment=assignment,
        mesh=mesh,
        itemsize=lambda dtype: itemsize_of(dtype, precision),
        batch=batch_factor,
        num_microbatches=num_microbatches,
    )
    total, local_scales = OpTime(), fabric.cluster.device.stack.local_scales
    # A chunked loss has the same ones for every chunk.
    for one, count in Counter(INSIDE[name](node, rule, sizes)).items():
        axes = [mesh.index(axis) for axis in one.axes]
        if prod(mesh.sizes[axis] for axis in axes) == 1 or (
            name in _SCALED and one.kind == "all_reduce" and local_scales
        ):
            continue
        collective, payload, reorder = Collective(one.kind), one.payload_bytes, 0.0
        if collective is Collective.ALL_TO_ALL:
            # Ranks wait for the one that most tokens go to; what arrives is put in the order of the experts.
            payload *= share_of_busiest(loads, rule.sizes[EXPERTS], sharing_ranks(assignment, mesh))
            reorder = fabric.cluster.device.kernel_launch_s + fabric.cluster.device.memory_seconds(2 * payload)
            sent_s = fabric.dispatch_time(payload, axes, _rows_per_token(node, rule, assignment, mesh))
        else:
            sent_s = fabric.time(collective, payload, axes)
        seconds = count * (sent_s + reorder)
        total += OpTime(seconds) if one.phase == "forward" else OpTime(0.0, seconds)
    return total


def _rows_per_token(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> float:
    """Rows of a token that a rank sends: those for experts that ranks with the same tokens have are theirs to send."""
    pairs = list(zip(assignment, mesh.axes, strict=True))
    copies = prod(
        axis.size for choice, axis in pairs if EXPERTS in factors_of_choice(choice) and choice not in rule.joint
    )
    return float(tensor_operands(node)[1].meta["val"].shape[-1]) / copies


def sharing_ranks(assignment: Assignment, mesh: Mesh) -> int:
    """Number of ranks that the experts are divided among."""
    pairs = zip(assignment, mesh.axes, strict=True)
    return prod(axis.size for choice, axis in pairs if EXPERTS in factors_of_choice(choice))
