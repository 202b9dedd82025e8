"""What a core takes beside the work and the bytes of an op: memory after products, functions, copies, rows of norms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.hardware.functions import ElementTime
from autopar.cost_model.stacks.known import find_stack
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
