"""What a core takes beside the work and the bytes of an op: memory after products, functions, copies, rows of norms,
masks and dropout of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.hardware.functions import ElementTime
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from tests.cost_model.test_ops import A100, ONE, call, linear

aten = torch.ops.aten


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
def test_a_copy_whose_lines_share_a_cache_set_takes_longer(positions: int, seconds: float) -> None:
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


def attention(length: int, *mask: tuple[int, ...], kind: str = "full", dropout_p: float = 0.0) -> fx.Node:
    heads = [(4, 12, length, 64)] * 3
    return call(composite.attention, *heads, *mask, kind=kind, scale=0.125, dropout_p=dropout_p)


def time_of(node: fx.Node, device: Device, needs_grad: set[fx.Node] | None = None) -> OpTime:
    return op_time(node, rule_for(node), (None,), ONE, device, needs_grad=needs_grad)


def with_rates(gpu: str) -> Device:
    rates = "{fp32: {peak_tflops: 0.1, efficiency: 0.5, attention_efficiency: 0.2, attention_by_length: {512: 0.25}}}"
    return cluster_from_yaml(f"{{gpu: {gpu}, num_gpus: 1, rates: {rates}}}").device


def core_of(**nanoseconds: tuple[float, float]) -> Device:
    """A core that reaches a quarter of its peak under a causal mask, of which half the scores count."""
    functions = tuple((name, ElementTime(*(1e-9 * one for one in own))) for name, own in nanoseconds.items())
    return replace(with_rates("cpu"), functions=functions, memory_bandwidth=1e15)


@pytest.mark.parametrize(("length", "computed"), [(64, 1.0), (512, 1.0), (1024, 0.75), (2048, 0.625), (1280, 0.68)])
def test_a_core_computes_whole_blocks_under_a_causal_mask(length: int, computed: float) -> None:
    causal, full = (time_of(attention(length, kind=kind), core_of()) for kind in ("causal", "full"))
    assert causal.forward_s / full.forward_s == pytest.approx(computed, rel=1e-3)
    assert causal.backward_s / full.backward_s == pytest.approx(computed, rel=1e-3)
    on_gpu = [time_of(attention(length, kind=kind), with_rates("a100-80gb")) for kind in ("causal", "full")]
    assert on_gpu[0].backward_s / on_gpu[1].backward_s == pytest.approx(0.5, rel=1e-2)


def test_a_mask_adds_to_an_attention_on_a_core_and_its_gradient_more() -> None:
    plain, core, length = core_of(), core_of(biased_score=(1.0, 5.0)), 1024
    scores = 4 * 12 * length * length
    for kind, forward, backward in (("full", 1.0, 5.0), ("causal", 0.75, 5.0 * 0.625)):
        node = attention(length, (1, 12, length, length), kind=kind)
        q, k, v, mask = node.args
        wanted = {q, k, v, node}
        for needed, added in ((wanted, 0.0), ({*wanted, mask}, backward)):
            first, second = (time_of(node, device, needed) for device in (plain, core))
            assert second.forward_s - first.forward_s == pytest.approx(1e-9 * scores * forward)
            assert second.backward_s - first.backward_s == pytest.approx(1e-9 * scores * added)


def test_a_mask_that_does_not_lie_row_by_row_is_copied_by_a_core() -> None:
    core = core_of(transposed=(3.0, 0.0))
    node = attention(250, (1, 12, 250, 250))
    in_order = time_of(node, core)
    with FakeTensorMode():
        node.args[3].meta["val"] = torch.empty(250, 250, 12).permute(2, 0, 1)[None]
    assert time_of(node, core).forward_s - in_order.forward_s == pytest.approx(3e-9 * 12 * 250 * 250)


def test_dropout_of_attention_on_a_core_takes_time_for_each_score_of_a_rank() -> None:
    plain, core, mesh = core_of(), core_of(dropped_score=(6.0, 2.0)), Mesh.of(x=4)
    node = attention(256, dropout_p=0.1)
    rule = rule_for(node)
    assert rule is not None
    for choice, ranks in ((None, 1), ("b", 4), ("h", 4), ("s", 4)):
        first, second = (op_time(node, rule, (choice,), mesh, device) for device in (plain, core))
        assert second.forward_s - first.forward_s == pytest.approx(6e-9 * 4 * 12 * 256 * 256 / ranks)
        assert second.backward_s - first.backward_s == pytest.approx(2e-9 * 4 * 12 * 256 * 256 / ranks)
