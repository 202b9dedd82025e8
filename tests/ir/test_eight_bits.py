"""Which products of a model are in 8-bit floats: by rule, and as a plan says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.analysis.blocks import find_repetition
from autopar.ir.analysis.eight_bits import kept_wide, products_of, recipes_by_rule
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan, InvalidInput, InvalidPlan
from autopar.ir.graph import CapturedModel, op_nodes
from autopar.ir.mesh import Mesh
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.op_recipes import recipe_of
from autopar.ir.plan import Plan
from autopar.ir.precision import parse_precision
from autopar.ir.rule import FactorRule
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise
from examples.gpt import GPT, Config


class Layer(nn.Module):
    """A gated choice of two halves, by a router, and a product whose sizes 8-bit units cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.router, self.odd = nn.Linear(32, 16), nn.Linear(32, 20)
        self.back = nn.Linear(20, 32)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).softmax(-1).topk(2).values.sum(-1, keepdim=True)
        return x + weight * self.down(self.up(x).relu()) + self.back(self.odd(x))


class Model(nn.Module):
    """Layers that repeat between two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def captured_model(model: nn.Module | None = None) -> CapturedModel:
    return normalise(capture(model or Model(), (torch.randn(8, 4, 16),)))


def test_by_rule() -> None:
    captured = captured_model()
    names = {product[0] for product in recipes_by_rule(captured, "fp8-row")}
    assert names == {f"layers.{number}.{name}" for number in range(3) for name in ("up", "down")}
    reasons = {
        str(node.meta["path"]): text for node, text in kept_wide(captured, find_repetition(captured), "fp8-row").items()
    }
    assert reasons["first"] == reasons["last"] == "one of the first or last layers"
    assert reasons["layers.1.router"] == "a router"
    assert reasons["layers.2.odd"] == "its sizes 20 x 32 are not multiples of 16"


def test_without_repeats_the_first_and_the_last_are_left() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    captured = normalise(
        capture(model, (torch.randn(8, 16),), loss_fn=nn.functional.mse_loss, example_target=torch.randn(8, 16))
    )
    assert {product[1] for product in recipes_by_rule(captured, "fp8-tensor")} == {"2.weight"}


def test_blocks_and_keys_are_those_of_the_model() -> None:
    captured = captured_model()
    plain = Analysis.of(captured)
    analysis = Analysis.of(captured, None, recipes_by_rule(captured, "fp8-row"))
    assert analysis.repetition.kinds == plain.repetition.kinds
    assert analysis.captured.fingerprint == captured.fingerprint
    assert sum(recipe_of(node) == "fp8-row" for node in op_nodes(analysis.captured.graph)) == 6
    assert len(products_of(captured)) == 17  # the model itself is not changed


def test_local_parts_are_multiples_of_sixteen() -> None:
    captured = captured_model()
    analysis = Analysis.of(captured, None, recipes_by_rule(captured, "fp8-tensor"))
    node = next(node for node in op_nodes(analysis.captured.graph) if recipe_of(node))
    rule = analysis.rule(node)
    assert rule.sizes["n"] == 64 and rule.allows(("n",), Mesh.of(a=4)) and not rule.allows(("n",), Mesh.of(a=8))
    assert rule.allows(("d0",), Mesh.of(a=8))  # rows are filled up


def rule_of_tiles(*lead: int) -> FactorRule:
    """Of a linear layer of 512 to 640 in fp8-block on rows of this shape."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.empty(*lead, 512), torch.empty(640, 512)
    node = graph.call_function(scaled_linear, (x, weight), {"recipe": "fp8-block"})
    node.meta["val"] = torch.empty(*lead, 640)
    return rule_for(node)


def test_parts_have_whole_tiles() -> None:
    rule = rule_of_tiles(4, 512)
    for factor, able, unable in (("k", 4, 8), ("n", 5, 10), ("d1", 4, 8)):
        assert rule.allows((factor,), Mesh.of(a=able)) and not rule.allows((factor,), Mesh.of(a=unable))
    assert rule.allows(("d0",), Mesh.of(a=4))  # 512 rows of a sample are whole tiles
    assert not rule.allows(("d1", "d1"), Mesh.of(a=4, b=2))


def test_samples_whose_rows_are_no_tiles_are_shared_where_several_are() -> None:
    rule = rule_of_tiles(16, 32)
    assert rule.allows(("d0",), Mesh.of(a=4)) and not rule.allows(("d0",), Mesh.of(a=8))
    assert not rule.allows(("d1",), Mesh.of(a=2))
    # One process has microbatches too, and so any part of the batch.
    assert rule.allows(("d0", None), Mesh.of(time=8, a=2), in_time=0)
    assert not rule.allows(("d0", "d0"), Mesh.of(time=2, a=4), in_time=0)


def test_zigzag_chunks_have_whole_tiles() -> None:
    with torch.device("meta"):
        model = GPT(Config(width=128, num_layers=2, num_heads=2, num_kv_heads=2, hidden=128, vocabulary=32))
        tokens = torch.zeros(2, 1024, dtype=torch.long)
    captured = normalise(capture(model, (tokens, tokens)))
    for recipe, able in ((None, 512), ("fp8-row", 512), ("fp8-block", 4), ("mxfp8", 16)):
        zigzag = Analysis.of(captured, None, recipes_by_rule(captured, recipe)).zigzag  # type: ignore[arg-type]
        assert zigzag.obstacle is None and zigzag.divides(able) and not zigzag.divides(2 * able)


def test_a_search_counts_tiles_of_the_rows_of_a_microbatch() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 128), nn.Linear(128, 16)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x).relu()
            return self.last(x).square().mean()

    given = {"example_inputs": (torch.randn(512, 16),), "dp": 2, "zero": 0, "precision": "fp32+fp8-block"}
    plan = autopar.search(Wide(), 2, num_microbatches=2, **given)
    (layers,) = (block for block in plan.blocks if block.recipes)
    assert all(layers.ops[key] == {"dp": "d0"} for key in layers.recipes)
    with pytest.raises(InfeasiblePlan, match="its sizes do not divide"):  # 64 rows a rank
        autopar.search(Wide(), 2, num_microbatches=4, **given)


def plan_with(recipes: dict[str, str], **others: object) -> Plan:
    found = autopar.search(
        Model(), 2, example_inputs=(torch.randn(8, 4, 16),), tp=2, precision="fp32+fp8-row", **others
    )
    fields = found.model_dump(mode="json")
    layers = next(block for block in fields["blocks"] if block["repeats"] == 3)
    assert layers["recipes"] == {"up/linear": "fp8-row", "down/linear": "fp8-row"}
    layers["recipes"] = recipes
    return Plan.from_yaml(Plan.model_validate(fields).to_yaml())


def test_a_plan_says_which() -> None:
    analysis = Analysis.for_plan(captured_model(), plan_with({"down/linear": "fp8-tensor"}))
    assert {(path, recipe) for (path, _, _), recipe in analysis.recipes.items()} == {
        (f"layers.{number}.down", "fp8-tensor") for number in range(3)
    }


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        (
            {"dwn/linear": "fp8-row"},
            r"'dwn/linear', which is no linear layer of it, nor its experts.\n  expected one of: down/linear",
        ),
        ({"up/relu": "fp8-row"}, "which is no linear layer"),
        ({"odd/linear": "fp8-row"}, r"its weight is 20 x 32.\n  at .*\n  expected sizes that are multiples of 16"),
    ],
)
def test_a_plan_that_cannot_be(recipes: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Analysis.for_plan(captured_model(), plan_with(recipes))


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(
        InvalidPlan,
        match=r"recipes.down/linear: Input should be 'fp8-tensor', 'fp8-delayed', 'fp8-row', .*'mxfp8' or 'nvfp4'",
    ):
        Plan.from_yaml(plan_with({}).to_yaml().replace("  recipes: {}", "  recipes: {down/linear: fp4}", 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", ("bf16", (None,))),
        ("fp8-row", ("bf16", ("fp8-row",))),
        ("fp32+fp8-tensor", ("fp32", ("fp8-tensor",))),
        ("bf16,fp8-tensor, fp8-row", ("bf16", (None, "fp8-tensor", "fp8-row"))),
    ],
)
def test_precisions_that_are_asked_for(text: str, expected: object) -> None:
    assert parse_precision(text) == expected


@pytest.mark.parametrize(
    ("text", "message"), [("fp9", "there is no 'fp9'"), ("fp32,fp8-row", "chooses for matrix products")]
)
def test_precisions_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_precision(text)
