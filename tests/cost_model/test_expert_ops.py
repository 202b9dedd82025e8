"""Experts: products of the rows that each of them gets, their biases, launches, and the rank that has most rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.expert_imbalance import share_of_busiest
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from tests.cost_model.test_ops import A100, ONE, call, linear, seconds


def moe(tokens: int, num_experts: int) -> fx.Node:
    """Two of the experts for each token."""
    x, chosen, hidden, inner = (tokens, 1024), (tokens, 2), 1024, 2048
    up, down = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    return call(composite.moe, x, chosen, chosen, up, down, activation="silu", gated=True, ints=(1,))


def test_experts_are_products_of_the_rows_that_each_of_them_gets() -> None:
    few, many = moe(1 << 15, 8), moe(1 << 15, 512)
    cost = OpCost.of(few, rule_for(few), A100, precision="bf16")
    assert [p.rows * (1 << 15) for p in cost.products] == pytest.approx([2 * (1 << 15) / 8] * 2)
    assert sum(p.flops for p in cost.products) == rule_for(few).flops
    rate = 312e12 * A100.matmul_rate("bf16").efficiency
    ideal = rule_for(few).flops / rate
    assert ideal < seconds(few, precision="bf16").forward_s < 2 * ideal, "and kernels between the products"
    assert seconds(many, precision="bf16").backward_s > 1.1 * seconds(few, precision="bf16").backward_s, "128 rows each"


@pytest.mark.parametrize("name", ["autopar", "autopar-compiled", "megatron-core-2025"])
def test_biases_of_experts_move_what_the_kernels_of_a_stack_do(name: str) -> None:
    tokens, hidden, inner = 1 << 15, 1024, 2048
    shapes: list[Any] = [(tokens, hidden), (tokens, 2), (tokens, 2), (8, 2 * inner, hidden), (8, hidden, inner)]
    options: dict[str, Any] = {"activation": "silu", "gated": True, "ints": (1,)}
    device = make_cluster("h100-sxm", 8, stack=find_stack(name)).device
    (up, up_back), (down, down_back) = device.stack.expert_biases
    launches = [8 * device.kernel_launch_s * own for own in device.stack.launches_of_bias]
    without, biased = (
        op_time(node, rule_for(node), (None,), ONE, device, precision="bf16")
        for node in (call(composite.moe, *shapes, *own, **options) for own in ([], [(8, 2 * inner), (8, hidden)]))
    )
    rows = 2 * tokens
    added = biased.forward_s - without.forward_s, biased.backward_s - without.backward_s
    moved = rows * (2 * inner * up + hidden * down), rows * (2 * inner * up_back + hidden * down_back)
    expected = tuple(device.memory_seconds(own) + kernels for own, kernels in zip(moved, launches, strict=True))
    assert added == pytest.approx(expected, rel=0.01, abs=1e-6)
    assert without.total_s < biased.total_s < 2 * without.total_s


def test_experts_on_a_core_reach_the_rate_of_other_products() -> None:
    core = make_cluster("cpu", 1, 1).device
    assert core.stack.grouped < 1.0
    node, other = moe(4096, 1), linear(8, 512, 1024, 4096)
    own = OpCost.of(node, rule_for(node), core, precision="fp32")
    assert own.efficiency == OpCost.of(other, rule_for(other), core, precision="fp32").efficiency


def test_experts_on_streams_have_kernels_of_their_own() -> None:
    node = moe(1 << 15, 64)
    device = make_cluster("h100-sxm", 8, stack=find_stack("megatron-core-2025")).device
    of_an_expert = OpCost.of(node, rule_for(node), device, precision="bf16").of_an_expert
    assert of_an_expert == (2, 4), "two products, and those of their gradients"
    grouped = replace(device, stack=replace(device.stack, expert_by_expert=False))
    own, joint = (OpCost.of(node, rule_for(node), d, precision="bf16").time((None,), ONE) for d in (device, grouped))
    assert own.forward_s - joint.forward_s == pytest.approx(64 * 2 * device.kernel_launch_s)
    assert own.backward_s - joint.backward_s == pytest.approx(64 * 4 * device.kernel_launch_s)


def test_rows_that_travel_leave_experts_as_many() -> None:
    node, mesh = moe(1 << 12, 64), Mesh.of(ep=8)
    rule = rule_for(node)
    (dispatch,) = rule.joint
    cost = OpCost.of(node, rule, A100, precision="bf16", batch_factor=dispatch.split("&")[0])
    travelling, divided = cost.time((dispatch,), mesh), cost.time((dispatch.split("&")[0],), mesh)
    assert travelling.forward_s < 0.8 * divided.forward_s, "an eighth of the tokens is 16 rows for each expert"


def test_experts_without_a_kernel_for_all_of_them_take_launches_each() -> None:
    node = moe(64, 64)
    single, grouped = (OpCost.of(node, rule_for(node), A100, precision=p) for p in ("fp32", "bf16"))
    assert (single.of_an_expert, grouped.of_an_expert) == ((8, 16), (0, 0))
    whole, shared = single.time((None,), ONE), single.time(("experts",), Mesh.of(ep=8))
    assert whole.forward_s - shared.forward_s > 2 * 4 * 56 * A100.kernel_launch_s


def test_the_rank_whose_experts_get_most_is_waited_for() -> None:
    even, skewed = (1.0,) * 8, (4.0, 4.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0)
    assert share_of_busiest((), 8, 4) == share_of_busiest((even,), 8, 4) == 1.0
    assert share_of_busiest((skewed,), 8, 4) == 2.0
    assert share_of_busiest((skewed,), 8, 2) == 1.0
    assert share_of_busiest((even, skewed), 8, 4) == 1.5
    assert share_of_busiest((skewed,), 16, 4) == 1.0, "of layers with as many experts"
    node = moe(1 << 15, 8)
    known = OpCost.of(node, rule_for(node), A100, precision="bf16", loads=(skewed,))
    unknown = OpCost.of(node, rule_for(node), A100, precision="bf16")
    assert known.time((None,), ONE) == unknown.time((None,), ONE)
    mesh = Mesh.of(ep=4)
    slow, fast = known.time(("experts",), mesh), unknown.time(("experts",), mesh)
    assert slow.forward_s == pytest.approx(2 * fast.forward_s, rel=0.05)
    assert slow.backward_s == pytest.approx(2 * fast.backward_s, rel=0.05)
