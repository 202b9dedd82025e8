"""What a user fixes of the recipes of linear layers, before the rule that finds them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.analysis.eight_bits import recipes_by_rule
from autopar.ir.errors import InfeasiblePlan, InvalidInput
from autopar.ir.recipe_pins import parse_pin
from tests.ir.test_eight_bits import Model, captured_model


def recipes(*pins: str, recipe: str | None = "fp8-row") -> dict[str, str]:
    found = recipes_by_rule(captured_model(), recipe, tuple(map(parse_pin, pins)))  # type: ignore[arg-type]
    return {module: own for (module, _, _), own in found.items()}


def test_a_pin_goes_before_the_rule_and_the_last_before_the_others() -> None:
    found = recipes("layers.*.[ud]*.weight: fp8-tensor", "*.down.weight: bf16", "*.router.weight: fp8-block")
    assert found == {f"layers.{n}.up": "fp8-tensor" for n in range(3)} | {
        f"layers.{n}.router": "fp8-block" for n in range(3)
    }


def test_layers_that_no_rule_finds_can_be_pinned() -> None:
    assert recipes("last.weight: mxfp8", recipe=None) == {"last": "mxfp8"}
    assert recipes("*.router.weight: fp8-row")["layers.1.router"] == "fp8-row"


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("*.dwn.weight: bf16", r"no linear layer has a weight of such a name.\n  names like it: .*down.weight"),
        ("*.odd.weight: fp8-row", r"layers.0.odd.weight is 20 x 32.\n  at .*\n  expected for fp8-row: multiples of 16"),
        ("layers.1.up.weight: bf16", r"is in no narrow floats and layers.0.up.weight in fp8-row; they are one layer"),
        ("*.up.weight: fp9", r"there is no 'fp9'"),
        ("*.up.weight", r"says no recipe"),
    ],
)
def test_pins_that_cannot_be(pin: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        recipes(pin)


def test_a_search_keeps_to_them() -> None:
    example = (torch.randn(8, 4, 16),)
    pins = {"*.up.weight": "fp32", "*.router.weight": "fp8-tensor"}
    plan = autopar.search(Model(), 1, example_inputs=example, precision="fp32+fp8-row", recipe_pins=pins)
    layers = next(block for block in plan.blocks if block.repeats == 3)
    assert layers.recipes == {"down/linear": "fp8-row", "router/linear": "fp8-tensor"}
    with pytest.raises(InfeasiblePlan, match=r"recipe of '\*' is bf16, and the other ops are in fp32"):
        autopar.search(Model(), 1, example_inputs=example, precision="fp32+fp8-row", recipe_pins={"*": "bf16"})


def test_without_a_recipe_only_what_is_pinned_has_one() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    plan = autopar.search(
        model,
        1,
        example_inputs=(torch.randn(8, 16),),
        loss_fn=nn.functional.mse_loss,
        example_target=torch.randn(8, 16),
        precision="fp32",
        recipe_pins={"2.weight": "fp8-row"},
    )
    assert [recipe for block in plan.blocks for recipe in block.recipes.values()] == ["fp8-row"]
