"""What casts to narrow floats move, and what products in them gain."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.casts import casts_of_product
from autopar.cost_model.compute.op_roofline import OpCost, op_time
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.compute.traffic import WORK, MovedTensor
from autopar.cost_model.hardware.device import Device
from autopar.cost_model.stacks.known import MEGATRON_CORE_2025, TORCHTITAN
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.rules import rule_for
from tests.cost_model.test_ops import call

ROWS, COLUMNS, DEPTH = 8192, 16384, 8192


def layer(recipe: str) -> fx.Node:
    return call(composite.scaled_linear, (ROWS, DEPTH), (COLUMNS, DEPTH), recipe=recipe)


def cost(recipe: str, device: Device) -> OpCost:
    node = layer(recipe)
    return OpCost.of(node, rule_for(node), device, precision="bf16")


@pytest.mark.parametrize(
    ("recipe", "number", "rows", "weight"),
    [
        ("fp8-tensor", 1.0, 2, (4, 2)),
        ("fp8-row", 1.0, 4, (2, 6)),
        ("mxfp8", 1 + 1 / 32, 0, (2, 2)),
        ("nvfp4", 0.5 + 1 / 16, 0, (2, 2)),
    ],
)
def test_compiled_casts_move_each_operand_in_both_orders_once(
    recipe: str, number: float, rows: int, weight: tuple[int, int]
) -> None:
    # rows, weight: bytes of an element that are read or written as they are, of the weight forward and backward.
    found = cost(recipe, make_cluster("b200", 8, stack=TORCHTITAN).device)
    num_rows, num_weights, num_results = ROWS * DEPTH, COLUMNS * DEPTH, ROWS * COLUMNS
    forward = [num_rows * (rows + 2 * number), num_weights * (weight[0] + number)]
    assert [own.num_bytes for own in found.casts] == forward
    backward = [num_results * (rows + 2 * number), num_weights * (weight[1] + number)]
    scaled = [num_rows * 4, num_weights * 4] if recipe == "fp8-row" else []
    assert [own.num_bytes for own in found.casts_back] == backward + scaled


def test_a_compiled_cast_by_a_known_maximum_reads_once() -> None:
    device = make_cluster("h100-sxm", 1, stack=TORCHTITAN).device
    one = MovedTensor(2.0, frozenset({WORK}), False, 2)
    at_hand, known = (
        casts_of_product((one, one), one, (0, 1), device, SCALINGS[recipe], shared=True)[0][0].num_bytes
        for recipe in ("fp8-tensor", "fp8-delayed")
    )
    assert (at_hand, known) == (2 * 2 + 1, 2 + 1)


def test_a_stack_that_casts_once_has_its_norms_write_eight_bits() -> None:
    device = make_cluster("h100-sxm", 1, stack=MEGATRON_CORE_2025).device
    one = MovedTensor(2.0, frozenset({WORK}), False, 2)
    of_norm, of_other = (
        casts_of_product((one, one), one, (0, 1), device, SCALINGS["fp8-tensor"], shared=False, by_norm=own)
        for own in (True, False)
    )
    # In both orders; what no norm makes is read as it is, too, and so are gradients.
    assert [own.num_bytes for own in of_norm[0]] == [1 + 1]
    assert [own.num_bytes for own in of_other[0]] == [2 + 1 + 1]
    assert [own.num_bytes for own in of_norm[1]] == [own.num_bytes for own in of_other[1]] == [2 + 1 + 1]


def test_four_bits_are_faster_than_eight_and_these_than_sixteen() -> None:
    device = make_cluster("b200", 8, stack=MEGATRON_CORE_2025).device
    four, eight = (cost(recipe, device).time((), Mesh(())).total_s for recipe in ("nvfp4", "mxfp8"))
    plain = call(torch.ops.aten.linear.default, (ROWS, DEPTH), (COLUMNS, DEPTH))
    sixteen = op_time(plain, rule_for(plain), (), Mesh(()), device, precision="bf16").total_s
    assert 1.5 < eight / four < 2 and 1.6 < sixteen / eight < 2.1


def experts(recipe: str | None) -> OpTime:
    node = call(
        composite.moe,
        (16, 2048, 4096),
        (16, 2048, 2),
        (16, 2048, 2),
        (8, 28672, 4096),
        (8, 4096, 14336),
        ints=(1,),
        activation="silu",
        gated=True,
        recipe=recipe,
    )
    device = make_cluster("h100-sxm", 8, stack=MEGATRON_CORE_2025).device
    return op_time(node, rule_for(node), (), Mesh(()), device, precision="bf16", batch_factor="d0")


def test_experts_by_tile_have_the_gradients_of_their_weights_in_sixteen_bits() -> None:
    sixteen, row, tile = map(experts, (None, "fp8-row", "fp8-block"))
    assert 1.4 < sixteen.forward_s / row.forward_s < 2 and tile.forward_s == pytest.approx(row.forward_s, rel=0.05)
    assert row.backward_s < tile.backward_s < sixteen.backward_s
    # One of the two products of each is in them.
    assert tile.backward_s == pytest.approx((row.backward_s + sixteen.backward_s) / 2, rel=0.1)
