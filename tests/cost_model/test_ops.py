"""Roofline of single ops: nothing but views is free, sharding divides the work, backward costs what it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.expert_imbalance import share_of_busiest
from autopar.cost_model.compute.flops import is_contraction, op_name
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.functions import ElementTime
from autopar.cost_model.stacks.attention_kernels import FLASH2_AMPERE
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.analysis.views import is_view
from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for

aten = torch.ops.aten
A100 = make_cluster("a100-80gb", 8).device
ONE, TWO_BY_FOUR = Mesh.of(x=1), Mesh.of(dp=2, tp=4)


def call(target: Any, *shapes: tuple[int, ...] | object, ints: tuple[int, ...] = (), **kwargs: Any) -> fx.Node:
    """A node of ``target`` on placeholders of these shapes (other values are passed as they are)."""
    graph = fx.Graph()
    args: list[Any] = []
    with FakeTensorMode():
        values: list[Any] = []
        for position, shape in enumerate(shapes):
            if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
                node = graph.placeholder(f"x{position}")
                dtype = torch.int64 if position in ints else torch.float32
                node.meta["val"] = torch.empty(shape, dtype=dtype)
                args.append(node)
                values.append(node.meta["val"])
            else:
                args.append(shape)
                values.append(shape)
        found = graph.call_function(target, tuple(args), kwargs)
        found.meta["val"] = target(*values, **kwargs)
    found.meta["source"] = "model.py:3 in forward"
    return found


def linear(batch: int = 8, seq: int = 512, inner: int = 1024, outer: int = 4096) -> fx.Node:
    return call(aten.linear.default, (batch, seq, inner), (outer, inner))


def seconds(node: fx.Node, **options: Any) -> OpTime:
    return op_time(node, rule_for(node), (None,), ONE, A100, **options)


OPS = {
    "add": call(aten.add.Tensor, (8, 64), (8, 64)),
    "gelu": call(aten.gelu.default, (8, 64)),
    "sum": call(aten.sum.dim_IntList, (8, 64), [1]),
    "softmax": call(aten._softmax.default, (8, 64), -1, False),
    "embedding": call(aten.embedding.default, (100, 64), (8, 16), ints=(1,)),
    "full": call(aten.full.default, [4, 4], 1.0),
    "linear": call(aten.linear.default, (8, 64), (32, 64), (32,)),
    "matmul": call(aten.matmul.default, (4, 8, 16), (4, 16, 8)),
    "layer_norm": call(aten.layer_norm.default, (8, 64), [64], (64,), (64,)),
    "rms_norm": call(composite.rms_norm, (8, 64), (64,), 1e-6),
    "attention": call(composite.attention, (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), kind="causal", scale=0.25),
    "cross_entropy": call(composite.cross_entropy, (8, 16, 100), (8, 16), ints=(1,)),
    "mul": call(aten.mul.Tensor, (8, 64), 2.0),
    "convolution": call(
        aten.convolution.default, (2, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
}
VIEWS = {
    "view": call(aten.view.default, (8, 64), [512]),
    "transpose": call(aten.transpose.int, (8, 64), 0, 1),
    "expand": call(aten.expand.default, (8, 1), [8, 64]),
    "slice": call(aten.slice.Tensor, (8, 64), 1, 0, 32),
    "split": call(aten.split_with_sizes.default, (8, 64), [32, 32], 1),
}


@pytest.mark.parametrize("name", OPS)
def test_every_op_costs_something(name: str) -> None:
    time = seconds(OPS[name])
    assert not is_view(OPS[name])
    assert time.forward_s >= A100.kernel_launch_s
    assert time.backward_s >= 0


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_free_forward_and_never_negative(name: str) -> None:
    time = seconds(VIEWS[name])
    assert is_view(VIEWS[name])
    assert time.forward_s == 0
    # Undoing a view is a view; undoing what drops or repeats elements fills a gradient.
    assert (time.backward_s == 0) == (name in ("view", "transpose"))


@pytest.mark.parametrize("name", OPS)
def test_contractions(name: str) -> None:
    expected = name in ("linear", "matmul", "attention", "convolution")
    assert is_contraction(OPS[name], rule_for(OPS[name])) is expected


def test_an_op_without_a_rule_raises_with_the_source_line() -> None:
    with pytest.raises(UnsupportedOp, match=r"no cost for aten\.gelu.*no factor rule\n  at: model.py:3 in forward"):
        op_time(OPS["gelu"], None, (None,), ONE, A100)


def test_large_matmul_runs_near_the_assumed_rate() -> None:
    node = linear(8, 4096, 8192, 8192)
    time = seconds(node, precision="bf16")
    flops = 2 * 8 * 4096 * 8192 * 8192
    assert rule_for(node).flops == flops
    rate = flops / time.forward_s / 312e12
    assert 0.95 * A100.matmul_rate("bf16").efficiency < rate < A100.matmul_rate("bf16").efficiency


def test_backward_of_a_linear_is_two_products_unless_its_input_needs_no_gradient() -> None:
    node = linear()
    _, weight = node.all_input_nodes
    both, one = seconds(node), seconds(node, needs_grad=frozenset([node, weight]))
    launch = A100.kernel_launch_s
    assert both.backward_s - 2 * launch == pytest.approx(2 * (both.forward_s - launch))
    assert one.backward_s - launch == pytest.approx(both.forward_s - launch)
    assert seconds(node, needs_grad=frozenset()).backward_s == 0


def moe(tokens: int, num_experts: int) -> fx.Node:
    """Two of the experts for each token."""
    x, chosen, hidden, inner = (tokens, 1024), (tokens, 2), 1024, 2048
    up, down = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    return call(composite.moe, x, chosen, chosen, up, down, activation="silu", gated=True, ints=(1,))


def test_the_kernel_of_a_convolution_is_part_of_its_depth() -> None:
    kernel = OPS["convolution"]
    (product,) = OpCost.of(kernel, rule_for(kernel), A100).products
    assert product.depth == 9.0


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


@pytest.mark.parametrize("window", [128, 1024, 4096, 1 << 14])
def test_a_window_has_the_rate_of_so_many_keys_and_half_a_tile_at_its_far_edge(window: int) -> None:
    length = 1 << 14
    found = FLASH2_AMPERE.fractions(128, length, causal=True, window=window)
    whole = FLASH2_AMPERE.fractions(128, min(window, length), causal=True)
    share = window / (window + 64) if window < length else 1.0
    assert found == pytest.approx(tuple(share * own for own in whole))
    shape, options = (1, 8, length, 128), {"kind": "sliding", "window": window, "scale": 0.1}
    sliding, causal = (
        seconds(call(composite.attention, shape, shape, shape, **own), precision="bf16").total_s
        for own in (options, {"kind": "causal", "scale": 0.1})
    )
    seen = window * (length - window / 2) / (length * length / 2)
    assert sliding >= 0.95 * seen * causal, "no faster for each key"
    if window == 128:
        assert sliding > 2 * seen * causal


@pytest.mark.parametrize(("rows", "bound"), [(256, True), (8192, False)])
def test_a_product_of_few_rows_takes_as_long_as_the_gradient_that_it_adds_to(rows: int, bound: bool) -> None:
    node, width = call(aten.linear.default, (4, rows, 4096), (16384, 4096)), 4096 * 16384
    device = make_cluster("h100-sxm", 8, stack=find_stack("megatron-core-2025")).device
    plain = replace(device, stack=replace(device.stack, adds_in_products=False))
    adding, without = (
        OpCost.of(node, rule_for(node), d, precision="bf16", batch_factor="d0").time((None,), ONE, 4).backward_s
        for d in (device, plain)
    )
    assert (adding > 1.2 * without) is bound
    assert adding >= device.memory_seconds(8 * width)
    alone = OpCost.of(node, rule_for(node), device, precision="bf16", batch_factor="d0").time((None,), ONE)
    assert alone == OpCost.of(node, rule_for(node), plain, precision="bf16", batch_factor="d0").time((None,), ONE)


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


def test_on_a_core_products_wait_for_memory() -> None:
    cpu, node = make_cluster("cpu", 1).device, linear()
    cost = OpCost.of(node, rule_for(node), cpu)
    (product,) = cost.products
    assert cost.time((None,), ONE).forward_s > sum(
        (
            product.flops / (cost.rate.peak_flops * cost.efficiency),
            cpu.memory_seconds(4 * (8 * 512 * 1024 + 1024 * 4096 + 8 * 512 * 4096)),
        )
    )


def test_a_function_of_elements_takes_longer_than_their_memory() -> None:
    """By name, forward and backward; a GELU by tanh is another than one by the error function."""
    measured = {"gelu": ElementTime(10e-9, 30e-9), "gelu_tanh": ElementTime(50e-9, 70e-9)}
    core = replace(make_cluster("cpu", 1, 1).device, functions=tuple(measured.items()))
    elements = 1 << 20

    def of(node: fx.Node) -> tuple[float, float]:
        time = op_time(node, rule_for(node), (None,), ONE, core)
        return time.forward_s / elements, time.backward_s / elements

    by_erf, by_tanh = (call(aten.gelu.default, (1 << 10, 1 << 10), **how) for how in ({}, {"approximate": "tanh"}))
    assert of(by_erf) == pytest.approx((10e-9, 30e-9), rel=0.02)
    assert of(by_tanh) == pytest.approx((50e-9, 70e-9), rel=0.02)
    hidden = op_time(by_tanh, rule_for(by_tanh), (None,), ONE, A100)
    assert hidden == op_time(by_erf, rule_for(by_erf), (None,), ONE, A100)


@pytest.mark.parametrize(
    ("stack", "copied"),
    [("autopar", True), pytest.param("autopar-compiled", False, id="a kernel made for the order as it is")],
)
def test_a_norm_copies_what_lies_in_another_order(stack: str, copied: bool) -> None:
    norm = call(aten.layer_norm.default, (64, 1024, 512), [512], (512,), (512,))
    device = replace(A100, stack=find_stack(stack), kernel_launch_s=0.0)
    in_order = op_time(norm, rule_for(norm), (None,), ONE, device)
    with FakeTensorMode():
        norm.args[0].meta["val"] = torch.empty(64, 512, 1024).transpose(1, 2)
    permuted = op_time(norm, rule_for(norm), (None,), ONE, device)
    both_ways = device.memory_seconds(2 * 4 * 64 * 1024 * 512) if copied else 0.0
    assert permuted.forward_s == pytest.approx(in_order.forward_s + both_ways)
    assert permuted.backward_s == pytest.approx(in_order.backward_s + both_ways)


@pytest.mark.parametrize(("positions", "seconds"), [(1024, 9e-8), (1280, 6e-8), (784, 3e-8)])
def test_a_core_copies_slower_what_has_few_places_in_its_cache(positions: int, seconds: float) -> None:
    copies = {"transposed": 3e-8, "transposed_1024": 6e-8, "transposed_4096": 9e-8}
    core = make_cluster("cpu", 1).device
    core = replace(core, functions=tuple((name, ElementTime(own)) for name, own in copies.items()))
    norm = call(aten.layer_norm.default, (8, positions, 96), [96], (96,), (96,))
    in_order = op_time(norm, rule_for(norm), (None,), ONE, core)
    with FakeTensorMode():
        norm.args[0].meta["val"] = torch.empty(8, 96, positions).transpose(1, 2)
    permuted = op_time(norm, rule_for(norm), (None,), ONE, core)
    assert permuted.forward_s - in_order.forward_s == pytest.approx(8 * 96 * positions * seconds)
    assert permuted.backward_s - in_order.backward_s == pytest.approx(8 * 96 * positions * seconds)


def test_a_core_takes_time_for_each_row_of_a_norm() -> None:
    core = make_cluster("cpu", 1).device
    slow = replace(core, functions=(("normalised_row", ElementTime(2e-6, 1e-6)),))
    norm = call(aten.layer_norm.default, (8, 50, 4, 24), [4, 24], (4, 24), (4, 24))
    first, second = (op_time(norm, rule_for(norm), (None,), ONE, device) for device in (core, slow))
    assert second.forward_s - first.forward_s == pytest.approx(8 * 50 * 2e-6)
    assert second.backward_s - first.backward_s == pytest.approx(8 * 50 * 1e-6)


def test_bias_adds_no_product() -> None:
    with_bias = call(aten.linear.default, (8, 512, 1024), (4096, 1024), (4096,))
    assert seconds(with_bias).backward_s == pytest.approx(seconds(linear()).backward_s, rel=0.05)


def test_causal_attention_takes_half_of_full_and_what_its_kernel_loses() -> None:
    shape = (2, 16, 4096, 128)
    full, causal = (call(composite.attention, shape, shape, shape, kind=kind, scale=0.1) for kind in ("full", "causal"))
    ratio = seconds(full, precision="bf16").forward_s / seconds(causal, precision="bf16").forward_s
    lost = FLASH2_AMPERE.fractions(128, 4096, causal=True)[0] / FLASH2_AMPERE.fractions(128, 4096, causal=False)[0]
    assert 0.8 < lost < 1
    assert ratio == pytest.approx(2 * lost, rel=0.05)


def test_pointwise_is_bound_by_bytes() -> None:
    node = call(aten.add.Tensor, (1 << 13, 1 << 13), (1 << 13, 1 << 13))
    expected = A100.memory_seconds(3 * 4 * (1 << 26)) + A100.kernel_launch_s
    assert seconds(node).forward_s == pytest.approx(expected)
    assert seconds(node, precision="bf16").forward_s == pytest.approx(expected, rel=0.5)
    assert seconds(node, precision="bf16").forward_s < 0.6 * expected


def test_a_lookup_reads_only_its_rows_but_writes_the_gradient_of_the_table() -> None:
    small = call(aten.embedding.default, (1000, 1024), (8, 128), ints=(1,))
    large = call(aten.embedding.default, (1000000, 1024), (8, 128), ints=(1,))
    assert seconds(small).forward_s == pytest.approx(seconds(large).forward_s)
    assert seconds(large).backward_s > 10 * seconds(small).backward_s


SQUARE = (1 << 13, 1 << 13)
PASS_S = A100.memory_seconds(4 * (1 << 26))


def graph_of(*calls: tuple[Any, tuple[str | float, ...]]) -> dict[str, fx.Node]:
    """Nodes of (op, arguments), named ``n0``, ``n1``, ..; an argument may name one, or the placeholder ``x``."""
    graph = fx.Graph()
    found = {"x": graph.placeholder("x")}
    with FakeTensorMode():
        found["x"].meta["val"] = torch.empty(SQUARE)
        for number, (target, arguments) in enumerate(calls):
            args = tuple(found[one] if isinstance(one, str) else one for one in arguments)
            node = found[f"n{number}"] = graph.call_function(target, args)
            node.meta["val"] = torch.empty(SQUARE)
    return found


def test_each_use_of_a_tensor_but_the_first_accumulates_a_gradient() -> None:
    mul = aten.mul.Tensor
    nodes = graph_of((mul, ("x", 2.0)), (mul, ("x", 2.0)), (mul, ("x", 2.0)), (mul, ("n2", "n2")))
    first, *others = (seconds(nodes[name]) for name in ("n0", "n1", "n2"))
    addition_s = 3 * PASS_S + A100.kernel_launch_s
    for other in others:
        assert other.forward_s == first.forward_s
        assert other.backward_s == pytest.approx(first.backward_s + addition_s)
    rule = rule_for(nodes["n1"])
    assert rule is not None
    parts = OpCost.of(nodes["n1"], rule, A100).time((rule.operands[0][0][0],), Mesh.of(x=4))
    assert parts.backward_s < 0.3 * others[0].backward_s, "each rank accumulates its shard"
    frozen = seconds(nodes["n1"], needs_grad={nodes[f"n{number}"] for number in range(4)})
    assert frozen.backward_s < addition_s, "a source without a gradient has none to add"
    twice = call(mul, SQUARE, SQUARE)
    assert seconds(nodes["n3"]).backward_s == pytest.approx(seconds(twice).backward_s + addition_s), "both in one op"


def test_accumulation_in_place_is_as_fast_as_an_optimiser() -> None:
    device = replace(A100, optimizer_bandwidth=3 * A100.memory_bandwidth * A100.memory_efficiency)
    mul, add = aten.mul.Tensor, aten.add.Tensor
    plain, last = graph_of((mul, ("x", 2.0)), (mul, ("x", 2.0))), graph_of((mul, ("x", 2.0)), (add, ("x", "n0")))
    middle = graph_of((mul, ("x", 2.0)), (add, ("x", "n0")), (mul, ("x", 2.0)))

    def backward_s(node: fx.Node) -> float:
        return op_time(node, rule_for(node), (None,), ONE, device).backward_s - device.kernel_launch_s

    own_s = 2 * PASS_S + device.kernel_launch_s
    assert backward_s(plain["n1"]) == pytest.approx(own_s + PASS_S), "the product's own gradient is overwritten"
    assert backward_s(last["n1"]) == pytest.approx(3 * PASS_S), "the addition passes the same gradient through to n0"
    assert backward_s(middle["n1"]) == pytest.approx(PASS_S), "the later use has made one already"


def test_additions_and_concatenations_pass_their_gradient_through() -> None:
    small = (1, 1 << 13)
    assert seconds(call(aten.add.Tensor, SQUARE, SQUARE)).backward_s == 0.0
    assert seconds(call(aten.sub.Tensor, SQUARE, SQUARE)).backward_s == pytest.approx(2 * PASS_S + A100.kernel_launch_s)
    broadcast = seconds(call(aten.add.Tensor, SQUARE, small)).backward_s
    assert PASS_S < broadcast < 1.01 * PASS_S + A100.kernel_launch_s, "summed for what was broadcast"
    negative = seconds(call(aten.neg.default, SQUARE)).backward_s
    assert negative == pytest.approx(2 * PASS_S + A100.kernel_launch_s), "nothing that it saved is read"
    whole = graph_of((aten.mul.Tensor, ("x", 2.0)))
    rows = whole["x"].graph.call_function(aten.cat.default, ([whole["x"], whole["n0"]],))
    with FakeTensorMode():
        rows.meta["val"] = torch.empty(1 << 14, 1 << 13)
    assert seconds(rows, needs_grad={rows, whole["n0"]}).backward_s == 0.0


def test_a_slice_fills_the_gradient_of_what_it_leaves_out() -> None:
    whole, half = 4 * (1 << 26), 2 * (1 << 26)
    node = call(aten.slice.Tensor, (1 << 13, 1 << 13), 1, 0, 1 << 12)
    assert seconds(node).backward_s == pytest.approx(A100.memory_seconds(whole + 2 * half) + 2 * A100.kernel_launch_s)
    split = call(aten.split_with_sizes.default, (1 << 13, 1 << 13), [1 << 12, 1 << 12], 1)
    assert seconds(split).backward_s == pytest.approx(A100.memory_seconds(2 * whole) + A100.kernel_launch_s), (
        "all results of a split are put together once"
    )


def test_integers_keep_their_size_in_bf16() -> None:
    node = call(aten.add.Tensor, (4096, 4096), (4096, 4096), ints=(0, 1))
    assert seconds(node) == seconds(node, precision="bf16")


def test_sharding_divides_work_and_partial_operands_do_not() -> None:
    node = linear(8, 2048, 4096, 4096)
    rule = rule_for(node)
    batch, rows, inner = rule.operands[0][0][0], rule.operands[1][0][0], rule.operands[0][2][0]

    def forward(assignment: tuple[str | None, ...]) -> float:
        return op_time(node, rule, assignment, TWO_BY_FOUR, A100).forward_s - A100.kernel_launch_s

    whole = forward((None, None))
    for split in ((batch, None), (rows, None), (inner, None)):
        assert forward(split) == pytest.approx(whole / 2, rel=0.1)
    assert forward((batch, rows)) == pytest.approx(whole / 8, rel=0.2)
    assert forward((None, "+0")) == pytest.approx(whole)


def test_thin_matrices_run_below_the_rate_of_large_ones() -> None:
    node = linear(8, 2048, 4096, 4096)
    rule, mesh = rule_for(node), Mesh.of(tp=64)
    whole = op_time(node, rule, (None,), mesh, A100).forward_s
    split = op_time(node, rule, (rule.operands[1][0][0],), mesh, A100).forward_s
    assert split > 1.2 * whole / 64


def test_microbatches_divide_what_carries_the_batch() -> None:
    node = linear(8, 2048, 4096, 4096)
    rule = rule_for(node)
    cost = OpCost.of(node, rule, A100, batch_factor=rule.operands[0][0][0])
    launch = A100.kernel_launch_s
    assert cost.time((None,), ONE, 4).forward_s - launch == pytest.approx(
        (cost.time((None,), ONE).forward_s - launch) / 4,
        rel=0.1,  # smaller products fill fewer waves
    )
    weightless = OpCost.of(node, rule, A100)
    assert weightless.time((None,), ONE, 4) == weightless.time((None,), ONE)


@given(st.sampled_from(sorted(OPS) + sorted(VIEWS)), st.data())
def test_more_ranks_never_cost_more(name: str, data: st.DataObject) -> None:
    node = {**OPS, **VIEWS}[name]
    rule = rule_for(node)
    choices = [c for c in rule.choices() if rule.allows((c,), Mesh.of(x=2))]
    choice = data.draw(st.sampled_from(choices))
    cost = OpCost.of(node, rule, A100, precision=data.draw(st.sampled_from(["fp32", "bf16"])))
    whole, split = cost.time((None,), ONE), cost.time((choice,), Mesh.of(x=2))
    assert 0 <= split.forward_s <= whole.forward_s + 1e-12
    assert 0 <= split.backward_s <= whole.backward_s + 1e-12


def test_op_names() -> None:
    assert op_name(OPS["linear"]) == "linear"
    assert op_name(OPS["attention"]) == "attention"
    assert all(tensor_results(node) for node in OPS.values())


def test_times_add_and_scale() -> None:
    time = OpTime(1, 2) + 2 * OpTime(3, 4)
    assert (time.forward_s, time.backward_s, time.total_s) == (7, 10, 17)
    forward_s, backward_s = time * 2
    assert (forward_s, backward_s) == (14, 20)
