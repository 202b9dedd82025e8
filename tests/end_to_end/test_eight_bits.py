"""Steps in 8-bit floats on several ranks against one process with the same recipe.

In float64 but for the 8-bit products, so that no number comes to lie on the other side of a half-way point by rounding:
what differs by more than rounding was scaled by another maximum.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import InvalidCluster
from benchmarks.issued import compared
from examples.gpt import GPT, Config
from tests.harness import run_ranks
from tests.parity import relative, with_attention, with_norms_in_parts

STEPS = 2
# Ranks and constraints; of each the microbatches that one process has to have too.
PLANS: dict[str, tuple[int, dict[str, Any], int]] = {
    "dp2": (2, {"dp": 2, "zero": 0}, 1),
    "zero3": (2, {"dp": 2, "zero": 3}, 1),
    "zero3 remat": (2, {"dp": 2, "zero": 3, "remat": "full"}, 1),
    "tp2": (2, {"tp": 2}, 1),
    "tp2 sp remat": (2, {"tp": 2, "sp": True, "remat": "alternate"}, 1),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}, 1),
    "pp2": (2, {"pp": 2}, 2),
    "pp2 zb": (2, {"pp": 2, "schedule": "zb-h1"}, 2),
    "cp2": (2, {"cp": 2}, 1),
}
# Where weights, and activations in parts of the sequence, are gathered in 8 bits by one scale.
GATHERED: dict[str, tuple[int, dict[str, Any], int]] = {
    "zero1": (2, {"dp": 2, "zero": 1}, 1),
    "zero3 held": (2, {"dp": 2, "zero": 3, "reshard_after_forward": False}, 1),
    "zero3 hsdp": (4, {"dp": 4, "zero": 3, "shard": 2}, 1),
    "zero3 tp2": (4, {"tp": 2, "dp": 2, "zero": 3}, 1),
    "tp2 sp norms": (2, {"tp": 2, "sp": True}, 1),
    "tp2 dp2 sp norms": (4, {"tp": 2, "dp": 2, "sp": True, "zero": 1, "remat": "selective"}, 1),
    "zero3 tp2 sp norms": (4, {"tp": 2, "dp": 2, "sp": True, "zero": 3, "remat": "full"}, 1),
}
# Recipes, and the plans that show what can go wrong with each. Tiles are wide, and so are the models that have several.
TILES = ("fp8-block", "mxfp8", "nvfp4")
RUNS: list[Any] = [("fp8-row", plan) for plan in PLANS] + [("fp8-tensor", "tp2 dp2"), ("fp8-tensor", "cp2")]
RUNS += [("fp8-tensor", "zero3 tp2"), ("fp8-tensor", "tp2 sp norms"), ("fp8-delayed", "tp2 dp2")]
RUNS += [("fp8-block", "tp2 dp2"), ("fp8-block", "cp2")]
MORE = [("fp8-tensor", plan) for plan in (*PLANS, *GATHERED)] + [("fp8-row", "zero3 tp2 sp norms")]
MORE += [("fp8-delayed", plan) for plan in (*PLANS, "zero3 tp2 sp norms")]
MORE += [("fp8-block", plan) for plan in ("zero3", "tp2 sp remat", "pp2 zb")]
MORE += [("mxfp8", "tp2 dp2"), ("mxfp8", "cp2"), ("nvfp4", "tp2 dp2"), ("nvfp4", "pp2"), ("nvfp4", "cp2")]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in MORE if run not in RUNS]


def model(recipe: str = "fp8-row") -> nn.Module:
    torch.manual_seed(0)
    width, hidden = (256, 256) if recipe in TILES else (32, 64)
    config = Config(width=width, num_layers=2, num_heads=4, num_kv_heads=4, hidden=hidden, vocabulary=32)
    return GPT(config).double()


def batch(step: int, recipe: str = "fp8-row") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (2, 256) if recipe in TILES else (4, 16)
    tokens, targets = (torch.randint(0, 32, shape, generator=generator) for _ in range(2))
    return tokens, targets


def train(plan: str, recipe: str, count: int) -> tuple[list[float], list[dict[str, Tensor]], list[str], int]:
    """Losses, gradients, what ranks send otherwise than recorded, and the number of products in 8-bit floats."""
    ranks, how, _ = (PLANS | GATHERED).get(plan, (1, {}, 1))
    how = {**how, "num_microbatches": count, "precision": f"fp32+{recipe}"}
    own, example = model(recipe), batch(0, recipe)
    if plan.endswith("norms"):
        how = {"plan": with_norms_in_parts(autopar.search(own, ranks, example_inputs=example, **how))}
    if plan == "cp2":
        how = {"plan": with_attention(autopar.search(own, ranks, example_inputs=example, **how), {"cp": "s&t"})}
    parallel = autopar.parallelize(own, ranks, example_inputs=example, **how)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses, gradients, unrecorded = [], [], list[str]()
    for step in range(STEPS):
        optimizer.zero_grad()
        with compared(parallel, unrecorded) if step == 1 and ranks > 1 else nullcontext():
            losses.append(float(parallel.step(*parallel.shard_batch(batch(step, recipe)))))
        gradients.append({name: grad.clone() for name, grad in parallel.full_gradients().items()})
        optimizer.step()
    products = sum(block.repeats * len(block.recipes) for block in parallel.plan.blocks)
    return losses, gradients, unrecorded, products


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Any]:
    """Runs of one process, by recipe and number of microbatches."""
    return {}


@pytest.mark.parametrize(("recipe", "plan"), RUNS)
def test_ranks_scale_as_one_process(recipe: str, plan: str, alone: dict[tuple[str, int], Any]) -> None:
    ranks, _, count = (PLANS | GATHERED)[plan]
    if (recipe, count) not in alone:
        alone[recipe, count] = run_ranks(train, 1, "", recipe, count)[0]
    wanted_losses, wanted, _, products = alone[recipe, count]
    assert products == 14
    losses, gradients, unrecorded, own_products = run_ranks(train, ranks, plan, recipe, count)[0]
    assert own_products == products and not unrecorded
    assert losses == pytest.approx(wanted_losses, rel=1e-7)  # pipelines add losses in float32
    for own, other in zip(gradients, wanted, strict=True):
        assert relative(own, other) < 1e-9


EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2 dp2": (4, {"ep": 2, "dp": 2, "zero": 0}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2": (2, {"tp": 2}),
}


def train_experts(plan: str, recipe: str) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Gradients of a second step, what ranks send otherwise than recorded, and the products with a recipe."""
    from benchmarks.models import CASES, build

    case, (ranks, how) = CASES["mixtral"], EXPERTS[plan]
    parallel = autopar.parallelize(
        build(case).double(), ranks, example_inputs=case.batch(0), num_microbatches=1, precision=f"fp32+{recipe}", **how
    )
    unrecorded = list[str]()
    for step in range(STEPS):
        parallel.zero_grad()
        with compared(parallel, unrecorded) if step == 1 and ranks > 1 else nullcontext():
            parallel.step(**parallel.shard_batch(case.batch(step)))
    keys = [key for block in parallel.plan.blocks for key in block.recipes]
    return {name: grad.clone() for name, grad in parallel.full_gradients().items()}, unrecorded, keys


EXPERT_RUNS: list[Any] = [("fp8-row", "ep2 dp2")]
EXPERT_RUNS += [
    pytest.param(recipe, plan, marks=pytest.mark.slow)
    for recipe in ("fp8-tensor", "fp8-row", "mxfp8")
    for plan in ("ep2 dp2", "zero3", "tp2")
    if (recipe, plan) not in EXPERT_RUNS
]


@pytest.mark.parametrize(("recipe", "plan"), EXPERT_RUNS)
def test_experts_scale_as_on_one_process(recipe: str, plan: str) -> None:
    pytest.importorskip("transformers")
    wanted, _, keys = run_ranks(train_experts, 1, "one", recipe)[0]
    assert any(key.endswith("moe") for key in keys)
    found, unrecorded, own = run_ranks(train_experts, EXPERTS[plan][0], plan, recipe)[0]
    assert own == keys and not unrecorded
    assert relative(found, wanted) < 1e-6  # the loss is in float32


def test_eight_bits_are_not_what_they_stand_for() -> None:
    """The comparison above would see another scale: the recipes differ from each other and from float64."""
    first, second = (run_ranks(train, 1, "", recipe, 1)[0][1][0] for recipe in ("fp8-tensor", "fp8-row"))
    assert relative(first, second) > 1e-2


def test_a_device_without_units_is_refused() -> None:
    with pytest.raises(
        InvalidCluster, match="A100-80GB has no units for the products of fp8-row; it has rates for fp32, bf16"
    ):
        autopar.search(model(), make_cluster("a100-80gb", 2), example_inputs=batch(0), precision="fp8-row")


@pytest.mark.parametrize(
    ("gpu", "recipe"), [("h100-sxm", "mxfp8"), ("h100-sxm", "nvfp4"), ("b200", "fp8-block"), ("mi355x", "nvfp4")]
)
def test_a_recipe_of_other_devices_is_refused_by_name(gpu: str, recipe: str) -> None:
    with pytest.raises(
        InvalidCluster,
        match=rf"no units for the products of {recipe};.*\n  try: .*a rate for {recipe} ",
    ):
        autopar.search(model(), make_cluster(gpu, 1), example_inputs=batch(0), precision=recipe)


def test_the_faster_one_is_taken() -> None:
    from autopar.cost_model.stacks.known import MEGATRON_CORE_2025

    cluster = make_cluster("h100-sxm", 1, stack=MEGATRON_CORE_2025)
    small = autopar.search(model(), cluster, example_inputs=batch(0), precision="bf16,fp8-row")
    assert not any(block.recipes for block in small.blocks)  # casts cost more than products of 32 x 32
    with torch.device("meta"):
        wide = GPT(Config(width=8192, num_layers=2, num_heads=64, num_kv_heads=8, hidden=28672))
        tokens = torch.zeros(2, 4096, dtype=torch.long)
    large = autopar.search(wide, cluster, example_inputs=(tokens, tokens), precision="bf16,fp8-row", remat="full")
    assert any(block.recipes for block in large.blocks)
    cluster = make_cluster("h100-sxm", 1)
    ours = autopar.search(wide, cluster, example_inputs=(tokens, tokens), precision="bf16,fp8-row", remat="full")
    assert not any(block.recipes for block in ours.blocks), "casts by torch's own kernels cost more than they save"
