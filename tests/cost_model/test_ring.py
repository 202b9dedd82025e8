"""A ring attention: what hides, what does not, who does most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import Fabric, point_to_point_time
from autopar.cost_model.communication.lowered_ops import lowering_time
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.compute.op_time import OpTime
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rule import Assignment
from autopar.ir.rules import rule_for
from autopar.ir.sequence import RingShape, Sight, block_work, blocks
from tests.cost_model.test_ops import call

CLUSTER = make_cluster("h100-sxm", 64)
LENGTH = 1 << 16


def _exposed(assignment: Assignment, mesh: Mesh, compute: OpTime, kind: str = "causal", **options: int) -> OpTime:
    node = call(composite.attention, *((1, heads, LENGTH, 64) for heads in (8, 2, 2)), kind=kind, scale=1.0, **options)
    fabric = Fabric(CLUSTER, mesh)
    return lowering_time(node, rule_for(node), assignment, fabric, precision="bf16", compute=compute)


def test_a_ring_hides_behind_its_compute() -> None:
    mesh = Mesh.of(cp=8)
    hidden, bare = _exposed(("s&t",), mesh, OpTime(1.0, 1.0)), _exposed(("s&t",), mesh, OpTime())
    piece = 2 * 2 * LENGTH // 8 * 64  # elements of local keys and values
    send, grads = (point_to_point_time(piece * size, CLUSTER.intra_node) for size in (2, 4))
    assert bare.forward_s - hidden.forward_s == pytest.approx(7 * send)
    assert bare.backward_s - hidden.backward_s == pytest.approx(7 * (send + grads))
    assert hidden.forward_s > 0 and hidden.backward_s > grads, "merging, and the way home"
    half = _exposed(("s&t",), mesh, OpTime(8 * send / 2, 0.0))
    assert half.forward_s - hidden.forward_s == pytest.approx(7 * send / 2)


def test_on_a_core_every_hop_and_block_is_issued_by_the_rank_that_computes() -> None:
    def with_launches_of(seconds: float) -> OpTime:
        base = make_cluster("cpu", 8, 8)
        cluster = replace(base, device=replace(base.device, kernel_launch_s=seconds))
        node = call(composite.attention, *((1, 8, 1024, 64) for _ in range(3)), kind="full", scale=1.0)
        fabric = Fabric(cluster, Mesh.of(cp=4, dp=2))
        return lowering_time(node, rule_for(node), ("s&t", None), fabric, precision="fp32", compute=OpTime())

    slow, fast = with_launches_of(1.0), with_launches_of(0.0)
    assert slow.forward_s - fast.forward_s == pytest.approx(40 + 3 * 47 + 4 * 8)
    assert slow.backward_s - fast.backward_s == pytest.approx(60 + 3 * 82 + 4 * 9)


def test_blocks_of_a_zigzag_sequence_are_merged_though_its_keys_are_whole() -> None:
    node = call(composite.attention, *((1, 8, LENGTH, 64) for _ in range(3)), kind="causal", scale=1.0)
    device, fabric = CLUSTER.device, Fabric(CLUSTER, Mesh.of(cp=4))

    def added(balanced: bool) -> OpTime:
        return lowering_time(node, rule_for(node), ("s",), fabric, precision="bf16", balanced=balanced)

    assert added(False) == OpTime()
    # Of chunks 0 to 7 the third rank has 2 and 5: 2 sees 0 and 1, and 2 in part; 5 sees 0 to 4, and 5 in part.
    work = block_work(RingShape(Sight("causal"), (LENGTH, LENGTH), 4, (4,), (False,)))
    assert work == (4, 2.0, 9 / 8), "keys are put in order, which is a copy"
    numel = 8 * LENGTH * 64
    merged = work.rows * (numel // 4) * (6 * 4 + 2) + 2 * 2 * (2 * numel)
    launches = 6 * work.number * device.kernel_launch_s
    assert added(True).forward_s == pytest.approx(device.memory_seconds(merged) + launches)
    assert added(True).backward_s > device.memory_seconds(work.columns * 2 * numel * (2 * 4 + 2))


@pytest.mark.parametrize("zigzag_ranks", [1, 32])
@pytest.mark.parametrize("sight", [Sight("full"), Sight("causal"), Sight("sliding", LENGTH // 4)])
def test_some_steps_of_a_long_ring_say_how_many_blocks_all_have(sight: Sight, zigzag_ranks: int) -> None:
    shape = RingShape(sight, (LENGTH, LENGTH), zigzag_ranks, (32,), (True,))
    place = 30
    every = [blocks(sight, shape.queries((place,)), shape.keys(((place - step) % 32,))) for step in range(32)]
    number = sum(map(len, every))
    assert block_work(shape).number == pytest.approx(number, rel=0.15, abs=1)
    assert block_work(RingShape(sight, (3, 3), 1, (4,), (True,))).number <= 4, "a rank without queries"


def test_links_and_windows() -> None:
    compute = OpTime()
    inside, across = _exposed(("s&t",), Mesh.of(cp=8), compute), _exposed(("s&t",), Mesh.of(cp=64), compute)
    assert across.forward_s > inside.forward_s
    # One hop in eight crosses nodes if the inner axis stays inside one.
    two = _exposed(("s&t", "s&t"), Mesh.of(out=8, inside=8), compute)
    assert inside.forward_s < two.forward_s < across.forward_s
    near = _exposed(("s&t",), Mesh.of(cp=8), compute, kind="sliding", window=LENGTH // 8)
    assert near.forward_s < inside.forward_s / 3


def test_the_rank_with_most_work_sets_the_time() -> None:
    node = call(composite.attention, *((1, 8, LENGTH, 64) for _ in range(3)), kind="causal", scale=1.0)
    device, mesh = CLUSTER.device, Mesh.of(cp=8)
    heads, contiguous, balanced = (
        OpCost.of(node, rule_for(node), device, balanced=balanced).time((choice,), mesh).total_s
        for choice, balanced in (("h", False), ("s&t", False), ("s&t", True))
    )
    assert balanced == pytest.approx(heads, rel=1e-3)
    assert contiguous == pytest.approx(heads * 15 / 8, rel=1e-2)
