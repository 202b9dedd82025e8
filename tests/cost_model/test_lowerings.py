"""Collectives inside lowered ops are priced by what they really send."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.lowered_ops import lowering_time
from autopar.cost_model.compute.op_roofline import op_time
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.redistribution import Collective
from autopar.ir.rule import Assignment
from autopar.ir.rules import rule_for
from tests.cost_model.test_ops import call

aten = torch.ops.aten

BATCH, SEQ, HIDDEN, INNER, EXPERTS, TOP_K = 32, 512, 1024, 2048, 16, 4
MOE = call(
    composite.moe,
    (BATCH, SEQ, HIDDEN),
    (BATCH, SEQ, TOP_K),
    (BATCH, SEQ, TOP_K),
    (EXPERTS, 2 * INNER, HIDDEN),
    (EXPERTS, HIDDEN, INNER),
    ints=(1,),
    activation="silu",
    gated=True,
)
CLUSTER = make_cluster("h100-sxm", 8)


def all_to_all(assignment: Assignment, mesh: Mesh, **options: object) -> OpTime:
    return lowering_time(MOE, rule_for(MOE), assignment, Fabric(CLUSTER, mesh), **options)  # type: ignore[arg-type]


def test_a_dispatch_is_two_all_to_alls_each_way_of_a_row_for_each_choice() -> None:
    mesh = Mesh.of(ep=8)
    found = all_to_all(("d0&experts",), mesh, precision="bf16", batch_factor="d0", num_microbatches=2)
    rows = BATCH * SEQ * TOP_K // 8 // 2
    fabric = Fabric(CLUSTER, mesh)
    sent = 2 * fabric.time(Collective.ALL_TO_ALL, rows * HIDDEN * 2, 0)
    reordered = 2 * CLUSTER.device.memory_seconds(2 * rows * HIDDEN * 2)
    assert found.backward_s == pytest.approx(sent + reordered + 2 * CLUSTER.device.kernel_launch_s)
    counted = fabric.time(Collective.ALL_GATHER, 8 * EXPERTS * 8, 0)
    assert found.forward_s == pytest.approx(found.backward_s + counted)


def test_experts_among_copies_of_the_tokens_exchange_nothing_and_lighten_an_exchange() -> None:
    mesh = Mesh.of(ep=4, tp=2)
    assert all_to_all((None, "experts"), mesh) == ZERO
    both, alone = (all_to_all(("d0&experts", other), mesh).total_s for other in ("experts", None))
    assert both < 0.6 * alone


@pytest.mark.parametrize("num_gpus", [8, 16])
def test_over_two_axes_rows_travel_at_once(num_gpus: int) -> None:
    """At the links of the group over both; inside a node and across nodes for less than over one after the other."""
    mesh = Mesh.of(ep=num_gpus // 4, tp=4)
    cluster = make_cluster("h100-sxm", num_gpus)
    fabric, rule = Fabric(cluster, mesh), rule_for(MOE)
    found = lowering_time(MOE, rule, ("d0&experts", "d1&experts"), fabric, precision="bf16")
    payload = BATCH * SEQ * TOP_K // num_gpus * HIDDEN * 2
    sent = fabric.time(Collective.ALL_TO_ALL, payload, [0, 1])
    reordered = cluster.device.kernel_launch_s + cluster.device.memory_seconds(2 * payload)
    assert found.backward_s == pytest.approx(2 * (sent + reordered))
    counted = fabric.time(Collective.ALL_GATHER, num_gpus * EXPERTS * 8, [0, 1])
    assert found.forward_s == pytest.approx(found.backward_s + counted)
    assert fabric.group([0, 1]).size == num_gpus
    assert sent < sum(fabric.time(Collective.ALL_TO_ALL, payload, axis) for axis in (0, 1))


def test_a_rank_sends_the_rows_of_its_own_experts_once_to_a_node() -> None:
    mesh = Mesh.of(ep=8, tp=2)
    cluster = make_cluster("h100-sxm", 16, stack=find_stack("megatron-core-2025-deepep"))
    fabric, rule = Fabric(cluster, mesh), rule_for(MOE)
    found = lowering_time(MOE, rule, ("d0&experts", "experts"), fabric, precision="bf16", batch_factor="d0")
    rows = BATCH * SEQ * TOP_K // 8 // 2
    sent = fabric.dispatch_time(rows * HIDDEN * 2, [0], TOP_K / 2)
    reordered = cluster.device.kernel_launch_s + cluster.device.memory_seconds(2 * rows * HIDDEN * 2)
    assert found.backward_s == pytest.approx(2 * (sent + reordered))


def test_a_stack_hides_a_dispatch_behind_the_experts_of_another_microbatch() -> None:
    mesh, rule = Mesh.of(ep=16), rule_for(MOE)
    waits, hides = (
        make_cluster("h100-sxm", 16, stack=find_stack(name))
        for name in ("megatron-core-2025", "megatron-core-2025-overlap")
    )

    def seconds(cluster: Cluster, compute_s: float, microbatches: int) -> float:
        compute = OpTime(compute_s / 3, 2 * compute_s / 3)
        return lowering_time(
            MOE, rule, ("d0&experts",), Fabric(cluster, mesh), precision="bf16", batch_factor="d0", compute=compute,
            num_microbatches=microbatches,
        ).total_s  # fmt: skip

    alone = seconds(waits, 1.0, 1)
    assert seconds(hides, 1.0, 1) == alone, "there is no other microbatch"
    whole = seconds(waits, 1.0, 2)
    assert seconds(waits, 1e-5, 2) == whole
    assert seconds(hides, 1e-5, 2) == pytest.approx(whole - hides.device.hidden * 1e-5)
    assert (1 - hides.device.hidden) * whole <= seconds(hides, 1.0, 2) < 0.9 * whole


@pytest.mark.parametrize(
    ("node", "choice"),
    [
        (call(aten.linear.default, (BATCH, SEQ, HIDDEN), (INNER, HIDDEN), (INNER,)), "k"),
        (call(composite.columns_linear, (BATCH, SEQ, HIDDEN), (HIDDEN, INNER), (INNER,)), "k"),
        (call(aten.mean.dim, (BATCH, SEQ, HIDDEN), [1]), "d1"),
        (call(aten.embedding.default, (EXPERTS, HIDDEN), (BATCH, SEQ), ints=(1,)), "v"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_sends_nothing_inside_costs_nothing_inside(node: fx.Node, choice: str) -> None:
    rule = rule_for(node)
    assert choice in rule.lowered
    assert lowering_time(node, rule, (choice,), Fabric(CLUSTER, Mesh.of(tp=8))) == ZERO


@pytest.mark.parametrize("choice", ["d0", "d1", "experts", "d0&experts", "d1&experts"])
def test_every_choice_divides_the_work_once(choice: str) -> None:
    mesh, rule = Mesh.of(x=8), rule_for(MOE)
    whole, part = (op_time(MOE, rule, (c,), mesh, CLUSTER.device, precision="bf16") for c in (None, choice))
    # Sharded tokens leave every rank all the weights to read.
    assert whole.forward_s / 8.5 < part.forward_s < whole.forward_s / 5
    assert rule.flops == 2 * BATCH * SEQ * TOP_K * HIDDEN * 3 * INNER


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
def test_split_classes_gather_two_numbers_a_token_and_three_with_label_smoothing(
    smoothing: float, numbers: int
) -> None:
    mesh, classes = Mesh.of(tp=4), 1000
    node = call(
        composite.cross_entropy,
        (BATCH, SEQ, classes),
        (BATCH, SEQ),
        ints=(1,),
        label_smoothing=smoothing,
        reduction="sum",
    )
    rule = rule_for(node)
    (choice,) = (factor for factor, name in rule.lowered.items() if name == "cross_entropy")
    fabric = Fabric(CLUSTER, mesh)
    found = lowering_time(node, rule, (choice,), fabric)
    assert found == OpTime(fabric.time(Collective.ALL_GATHER, 4 * numbers * BATCH * SEQ * 4, 0))
