"""What runs between the products of experts: the bytes and functions that are priced are those of the runtime's ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.expert_kernels import BetweenProducts
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.hardware.functions import ElementTime
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from tests.cost_model.test_ops import call

CORE = make_cluster("cpu", 1).device
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 512, 64, 160, 4, 2
CHOSEN = TOKENS, CHOICES
ONE = Mesh.of(x=1)


def shapes(*, gated: bool) -> tuple[tuple[int, ...], ...]:
    wide = 2 * INNER if gated else INNER
    return (TOKENS, HIDDEN), CHOSEN, CHOSEN, (EXPERTS, wide, HIDDEN), (EXPERTS, HIDDEN, INNER)


def moe(activation: str, *, gated: bool) -> fx.Node:
    return call(composite.moe, *shapes(gated=gated), activation=activation, gated=gated, ints=(1,))


class Moved(TorchDispatchMode):
    """Bytes of floating point tensors that ops other than products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if not func.is_view and func.overloadpacket not in (aten.mm, aten.empty_like):
            read = args if func.overloadpacket is not aten.new_zeros else ()
            given = [one for arg in read for one in (arg if isinstance(arg, list) else [arg])]
            tensors = [one for one in (*given, made) if isinstance(one, Tensor) and one.is_floating_point()]
            self.num_bytes += sum(one.nbytes for one in tensors)
        return made


@pytest.mark.parametrize("gated", [True, False])
def test_bytes_between_products_are_those_of_the_ops_that_run_there(gated: bool) -> None:
    priced = BetweenProducts.of(moe("silu", gated=gated), "fp32", None, CORE).moved
    torch.manual_seed(0)
    x, _, weight, up, down = (torch.randn(size, requires_grad=True) for size in shapes(gated=gated))
    index = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices
    with Moved() as forward:
        result = composite.moe(x, index, weight, up, down, activation="silu", gated=gated)
    grad = torch.ones_like(result)
    with Moved() as backward:
        result.backward(grad)
    for own, moved in zip(priced, (forward, backward), strict=True):
        assert own.num_bytes == pytest.approx(moved.num_bytes, rel=0.08), "tokens are counted as rows, sums are not"


def test_functions_between_products_are_taken_of_each_row() -> None:
    slow = replace(CORE, functions=(("silu", ElementTime(1e-6, 3e-6)), ("sigmoid", ElementTime(1e-5, 1e-5))))
    rows = TOKENS * CHOICES * INNER
    without, named, twice = (
        OpCost.of(node, rule_for(node), device).time((None,), ONE)
        for node, device in (
            (moe("silu", gated=True), replace(CORE, functions=())),
            (moe("silu", gated=True), slow),
            (moe("mul(mul(sigmoid(gate), sigmoid(gate)), value)", gated=True), slow),
        )
    )
    assert named.forward_s - without.forward_s == pytest.approx(rows * 1e-6)
    assert named.backward_s - without.backward_s == pytest.approx(rows * 3e-6)
    assert twice.forward_s - without.forward_s == pytest.approx(2 * rows * 1e-5)


def test_experts_whose_products_are_there_take_what_runs_between_them() -> None:
    node = moe("silu", gated=True)
    cost = OpCost.of(node, rule_for(node), CORE)
    beside, mesh = cost.beside_products_s((None,), ONE, 1), Mesh.of(ep=4)
    between = BetweenProducts.of(node, "fp32", None, CORE).time(CORE, {}, 1, 1.0).forward_s
    assert between < beside < between + 20 * CORE.kernel_launch_s
    assert beside < cost.time((None,), ONE).forward_s
    assert cost.beside_products_s(("experts",), mesh, 1) < 0.5 * beside, "a quarter of the rows"
