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
from autopar.cost_model.compute.flops import is_contraction, op_name
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.compute.op_time import OpTime
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


def test_the_kernel_of_a_convolution_is_part_of_its_depth() -> None:
    kernel = OPS["convolution"]
    (product,) = OpCost.of(kernel, rule_for(kernel), A100).products
    assert product.depth == 9.0


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
