"""Kernels of several ops: what is in one, what it moves, and what that does to prices on a stack that has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.lowered_ops import lowering_time
from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.compute.fusion import fused_ops, merged_products
from autopar.cost_model.stacks.known import (
    AUTOPAR,
    COMPILED,
    MEGATRON_CORE,
    NORMS,
    TORCHTITAN,
    TORCHTITAN_EAGER,
    find_stack,
)
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InvalidCluster
from autopar.ir.graph import CapturedModel, op_nodes
from autopar.ir.mesh import Mesh
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise
from autopar.search.outer.prices import Prices
from autopar.search.problem.workload import Workload

WIDTH, ROWS = 64, 32


class Block(nn.Module):
    """Norm, two products of its result, a gate, a product, and the residual; then a rotation of the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.tanh()
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        first, second = x.chunk(2, -1)
        return (x * 2 + torch.cat((-second, first), -1) * 3).sum()


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    with torch.device("meta"):
        return normalise(capture(Block(), torch.empty(ROWS, WIDTH)))


def named(captured: CapturedModel, name: str) -> list[fx.Node]:
    return [node for node in op_nodes(captured.graph) if op_name(node) == name]


def test_a_kernel_reads_what_it_does_not_make_once_and_writes_what_others_use(captured: CapturedModel) -> None:
    found = fused_ops(op_nodes(captured.graph), frozenset())
    (silu,), products = named(captured, "silu"), named(captured, "mul")
    gated = products[0]
    assert (found[silu].read, found[silu].written, found[silu].leads) == ({0}, frozenset(), False)
    assert (found[gated].read, found[gated].written, found[gated].leads) == ({1}, {0}, True)
    (tanh,), additions = named(captured, "tanh"), named(captured, "add")
    assert found[tanh].read | found[additions[0]].read == {0}, "both read x, which is read once"
    rotated = [node for node in found if node not in (silu, gated, tanh, additions[0])]
    assert sum(len(found[node].read) for node in rotated) == 2, "the residual and the product that is added to it"
    assert sum(found[node].leads for node in rotated) == 1


def test_additions_to_the_residual_with_products_between_them_are_two_kernels(captured: CapturedModel) -> None:
    found = fused_ops(op_nodes(captured.graph), NORMS)
    first, second = named(captured, "add")[:2]
    assert found[first].written == {0}
    assert 0 in found[second].read


def test_a_norm_is_in_a_kernel_where_the_stack_says_so(captured: CapturedModel) -> None:
    (norm,) = named(captured, "rms_norm")
    assert norm not in fused_ops(op_nodes(captured.graph), frozenset())
    assert fused_ops(op_nodes(captured.graph), NORMS)[norm].read == {1}, "its weight; the sum is made inside"


def test_products_of_one_tensor_are_one(captured: CapturedModel) -> None:
    gate, up, down = named(captured, "linear")
    found = merged_products(op_nodes(captured.graph))
    assert found.keys() == {up}
    assert 0 not in found[up].read
    assert not {gate, down} & found.keys()


def test_prices_fall_by_what_stays_inside_a_kernel(captured: CapturedModel) -> None:
    workload, device = Workload.of(captured, "bf16"), make_cluster("h100-sxm", 1).device
    seconds = {}
    for stack in (AUTOPAR, replace(AUTOPAR, fuses=True), replace(AUTOPAR, fuses=True, reductions=NORMS), COMPILED):
        cluster = replace(make_cluster("h100-sxm", 1), device=replace(device, stack=stack))
        ops = Prices(workload, cluster).ops
        times = {node: ops.time(node, (None,), Mesh.of(dp=1), 1) for node in op_nodes(captured.graph)}
        assert all(time.forward_s >= 0 and time.backward_s >= 0 for time in times.values())
        assert all(times[node].forward_s > 0 for node in named(captured, "linear"))
        seconds[stack] = sum(time.total_s for time in times.values())
    eager, pointwise, norms, compiled = seconds.values()
    assert eager > 1.2 * pointwise
    assert pointwise >= norms > compiled


def test_a_rotation_of_complex_numbers_moves_what_its_stack_says_forward_and_backward(captured: CapturedModel) -> None:
    workload, device = Workload.of(captured, "bf16"), make_cluster("h100-sxm", 1).device
    (joined,) = named(captured, "cat")
    one, several = (
        Prices(
            workload,
            replace(make_cluster("h100-sxm", 1), device=replace(device, stack=replace(COMPILED, rotation_bytes=moved))),
        ).ops.cost(joined)
        for moved in ((0.0, 0.0), (16.0, 12.0))
    )
    found = [
        sum(own.num_bytes for own in getattr(several, name)) - sum(own.num_bytes for own in getattr(one, name))
        for name in ("read", "backward_read")
    ]
    assert found == [ROWS * WIDTH * 16, ROWS * WIDTH * 12]
    assert TORCHTITAN.rotation_bytes == (16.0, 16.0) and not any(TORCHTITAN_EAGER.rotation_bytes)


def test_a_stack_that_overlaps_hides_a_part_of_its_collectives() -> None:
    ours, theirs = (make_cluster("h100-sxm", 8, stack=stack).device for stack in (AUTOPAR, MEGATRON_CORE))
    (gather, *_) = MEGATRON_CORE.overlaps
    assert ours.exposed(gather) == 1
    assert 0 < theirs.exposed(gather) < 1


def test_an_unknown_stack_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidCluster, match=r"unknown software stack 'megatron-cor'; did you mean .*megatron-core-20"):
        find_stack("megatron-cor")


def test_scales_of_whole_tensors_are_waited_for_where_the_stack_takes_them() -> None:
    graph = fx.Graph()
    x, weight = (graph.placeholder(name) for name in ("x", "w"))
    x.meta["val"], weight.meta["val"] = (torch.empty(shape, device="meta") for shape in ((4096, 1024), (512, 1024)))
    node = graph.call_function(scaled_linear, (x, weight), {"recipe": "fp8-tensor"})
    node.meta["val"] = torch.empty(4096, 512, device="meta")
    rule, mesh = rule_for(node), Mesh.of(tp=8)
    rows = rule.operands[0][0][0]
    ours, theirs = (
        lowering_time(node, rule, (rows,), Fabric(make_cluster("h100-sxm", 8, stack=stack), mesh), precision="bf16")
        for stack in (AUTOPAR, MEGATRON_CORE)
    )
    assert ours.forward_s > 0 and ours.backward_s > 0
    assert theirs.total_s == 0
