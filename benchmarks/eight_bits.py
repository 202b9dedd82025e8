"""Training in 8-bit floats: parallel plans against one process with the same recipe, and on a GPU what products gain.

    python benchmarks/eight_bits.py [--models llama,t5] [--plans zero3,tp2] [--recipes fp8-row] [--only parity,speed]

The first part prints, for models x plans, the largest relative error of any loss and of any gradient over three steps
of SGD, with all but the 8-bit products in float64 and in float32. Where a number is half-way between two of an 8-bit
float, rounding decides which of them it becomes, and then all that is computed of it differs as much as 8 bits do. In
float64 that hardly ever happens, norms and losses included, which models compute in float32: there the limits are
those of parity, 1e-5 for losses and 1e-4 for gradients. Above them it exits with 1, as where ranks send in the second
step what the placed model does not record. In float32 it happens now and then: beside the errors stand those of one
process with the rows of each batch in reverse order, and with parameters that differ in their last bit.

The second part, on a GPU alone: milliseconds of linear layers, forward and backward, in bfloat16 and by each recipe, op
by op and compiled, and the speed-up beside the predicted one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from autopar.ir.ops.composite import scaled_linear
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.plan import Recipe
from benchmarks.issued import compared
from benchmarks.models import CASES, build
from benchmarks.traces import in_float64
from tests.harness import RankFailure, run_ranks
from tests.parity import relative, with_attention


class Errors(NamedTuple):
    """The largest relative errors over all steps."""

    loss: float
    gradient: float

    def __str__(self) -> str:
        return f"{self.loss:.0e} {self.gradient:.0e}"


MODELS = "llama,gpt2,bert,t5,mixtral,deepseek_v3,gemma2,vit_40"
# Ranks, constraints of the search, and the factor of every attention on axis cp where that is not left to it.
PLANS: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "dp2": (2, {"dp": 2, "zero": 0}, None),
    "zero3": (2, {"dp": 2, "zero": 3}, None),
    "tp2": (2, {"tp": 2}, None),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}, None),
    "pp2": (2, {"pp": 2}, None),
    "cp2": (2, {"cp": 2}, "s&t"),
    "ep2": (2, {"ep": 2}, None),
}
STEPS = 3
# Of the errors in float64.
LIMITS = Errors(loss=1e-5, gradient=1e-4)

# Rows, columns and depth of the layers that are timed: those of Llama-3-8B and 70B at 8,192 tokens.
LAYERS = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 28672, 8192))


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses and gradients of each step. products: number of matrix products in 8-bit floats. unrecorded: what ranks
    send otherwise than recorded."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    products: int
    unrecorded: list[str]

    def errors(self, other: Trained) -> Errors:
        """Those of losses and gradients."""
        losses = zip(self.losses, other.losses, strict=True)
        gradients = zip(self.gradients, other.gradients, strict=True)
        return Errors(max(abs(a - b) / abs(b) for a, b in losses), max(relative(a, b) for a, b in gradients))


class Job(NamedTuple):
    """One run. change: "" or how one process differs: "reversed" rows, or parameters that are "rounded" anew. wide: in
    float64."""

    plan: str
    recipe: str
    num_microbatches: int
    change: str
    wide: bool


def train_all(name: str, jobs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...] | str]:
    """Body of a rank: the parts of ``Trained`` of each job, or why its plan cannot be."""
    return [train(name, Job(*job)) for job in jobs]


def train(name: str, job: Job) -> tuple[Any, ...] | str:
    """One job on this rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case, ranks = in_float64(CASES[name]) if job.wide else CASES[name], dist.get_world_size()
    model, example = build(case), case.batch(0)
    if job.change == "rounded":
        _round_anew(model)
    extra: dict[str, Any] = {"loss_fn": case.loss_fn} if case.loss_fn is not None else {}
    _, pinned, attention = PLANS.get(job.plan, (1, {}, None))
    how: dict[str, Any] = {**pinned, "num_microbatches": job.num_microbatches, "precision": f"fp32+{job.recipe}"}
    try:
        if attention is not None:
            found = autopar.search(model, ranks, example_inputs=example, **extra, **how)
            if not any(key.endswith("attention") for block in found.blocks for key in block.ops):
                return "the search divides no attention over it"
            how = {"plan": with_attention(found, {"cp": attention})}
        parallel = autopar.parallelize(model, ranks, example_inputs=example, **extra, **how)
    except autopar.AutoparError as error:
        return str(error).splitlines()[0]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1 * case.learning_rate)
    losses, gradients, unrecorded = [], [], list[str]()
    for step in range(STEPS):
        batch = case.batch(step)
        if job.change == "reversed":
            batch = {key: value.flip(0) if isinstance(value, Tensor) else value for key, value in batch.items()}
        optimizer.zero_grad()
        with compared(parallel, unrecorded) if step == 1 and ranks > 1 else nullcontext():
            losses.append(float(parallel.step(**parallel.shard_batch(batch))))
        gradients.append({key: value.clone() for key, value in parallel.full_gradients().items()})
        optimizer.step()
    products = sum(block.repeats * len(block.recipes) for block in parallel.plan.blocks)
    return losses, gradients, products, unrecorded


def _round_anew(model: nn.Module) -> None:
    """Change every parameter by one unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))


def microbatches_of(plan: str) -> int:
    """Microbatches of a plan, and of the process that it is compared with."""
    return 2 if PLANS[plan][1].get("pp") else 1


def runs_of(name: str, jobs: Sequence[Job]) -> dict[Job, Trained | str]:
    """Each job as the first of its ranks has it, those of one number of ranks in one group of processes."""
    found: dict[Job, Trained | str] = {}
    for ranks in sorted({_ranks_of(job) for job in jobs}):
        own = [job for job in jobs if _ranks_of(job) == ranks]
        try:
            results = run_ranks(train_all, ranks, name, [tuple(job) for job in own], limit_s=1800.0)[0]
        except RankFailure as failure:
            results = [f"failed: {str(failure).strip().splitlines()[-1]}"] * len(own)
        found |= {job: one if isinstance(one, str) else Trained(*one) for job, one in zip(own, results, strict=True)}
    return found


def _ranks_of(job: Job) -> int:
    return PLANS[job.plan][0] if job.plan else 1


def parity(models: list[str], plans: list[str], recipes: list[str]) -> bool:
    """Print the table. Whether all cells are within their limits."""
    every = True
    for name in models:
        jobs = [
            Job(plan, recipe, microbatches_of(plan), "", wide)
            for plan in plans
            for recipe in recipes
            for wide in (True, False)
        ]
        alone = {job._replace(plan="") for job in jobs}
        changed = [Job("", recipe, 1, change, False) for recipe in recipes for change in ("", "reversed", "rounded")]
        found = runs_of(name, [*dict.fromkeys((*alone, *changed)), *jobs])
        for recipe in recipes:
            same, *others = (found[Job("", recipe, 1, change, False)] for change in ("", "reversed", "rounded"))
            if isinstance(same, str):
                print(f"{recipe:<11} {name:<12} one process {same}", flush=True)
                every = False
                continue
            rows, bits = (_errors(own, same) for own in others)
            text = f"rows reversed {rows}  last bits {bits}  {same.products} products in 8 bits"
            print(f"{recipe:<11} {name:<12} rounding     {text}", flush=True)
            for plan in plans:
                text, fits = _cell(found, Job(plan, recipe, microbatches_of(plan), "", True))
                print(f"{recipe:<11} {name:<12} {plan:<12} {text}", flush=True)
                every &= fits
    return every


def _cell(found: Mapping[Job, Trained | str], job: Job) -> tuple[str, bool]:
    """What is printed of a cell, and whether it is within its limit. job: in float64."""
    errors, others = [], []
    for wide in (True, False):
        own = found[job._replace(wide=wide)]
        expected = found[job._replace(plan="", wide=wide)]
        for one in (own, expected):
            if isinstance(one, str):
                return one if one.startswith("failed") else f"cannot be: {one}", not one.startswith("failed")
        errors.append(_errors(own, expected))
        others += own.unrecorded if isinstance(own, Trained) else []
    fits = all(error <= limit for error, limit in zip(errors[0], LIMITS, strict=True)) and not others
    return f"{errors[0]}  {'ok  ' if fits else 'OVER'}  float32 {errors[1]}  {'; '.join(others)}".rstrip(), fits


def _errors(found: Trained | str, expected: Trained | str) -> Errors:
    if isinstance(found, str) or isinstance(expected, str):
        return Errors(float("inf"), float("inf"))
    return found.errors(expected)


def speed(recipes: list[str]) -> None:
    """Print what linear layers take on this GPU beside the prediction for it."""
    from autopar.local_cluster import local_cluster

    device = local_cluster(1, torch.device("cuda", 0)).device
    recipes = [recipe for recipe in recipes if SCALINGS[recipe].rate in device.precisions]  # type: ignore[index]  # one
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; predicted for {device.name}")
    print(f"{'rows x columns x depth':<24} {'recipe':<11} {'bf16 ms':>8} {'ms':>7} {'gain':>5} {'predicted':>9}")
    for shape in LAYERS:
        for fused in (False, True):
            plain = _milliseconds(shape, None, fused=fused)
            for recipe in recipes:
                own = _milliseconds(shape, recipe, fused=fused)
                gain = predicted_gain(shape, recipe, device)
                how = f"{recipe}{' c' if fused else ''}"
                size = " x ".join(map(str, shape))
                print(f"{size:<24} {how:<11} {plain:8.2f} {own:7.2f} {plain / own:5.2f} {gain:9.2f}", flush=True)
    print("c: compiled")


def predicted_gain(shape: tuple[int, int, int], recipe: str, device: Any) -> float:
    """Time of a layer in bfloat16 over that by ``recipe``, forward and backward, as the cost model has it."""
    from autopar.cost_model.compute.op_roofline import op_time
    from autopar.ir.mesh import Mesh
    from autopar.ir.rules import rule_for

    rows, columns, depth = shape
    graph = torch.fx.Graph()
    x, weight = (graph.placeholder(name) for name in ("x", "w"))
    x.meta["val"] = torch.empty(rows, depth, device="meta")
    weight.meta["val"] = torch.empty(columns, depth, device="meta")
    times = []
    for target, options in ((torch.ops.aten.linear.default, {}), (scaled_linear, {"recipe": recipe})):
        node = graph.call_function(target, (x, weight), options)
        node.meta["val"] = torch.empty(rows, columns, device="meta")
        took = op_time(node, rule_for(node), (), Mesh(()), device, precision="bf16")
        times.append(took.total_s)
    return times[0] / times[1]


def _milliseconds(shape: tuple[int, int, int], recipe: Any, *, fused: bool, repeats: int = 20) -> float:
    rows, columns, depth = shape
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight) if recipe is None else scaled_linear(x, weight, recipe=recipe)

    run = torch.compile(layer) if fused else layer
    for _ in range(3):
        torch.autograd.grad(run(x, weight), (x, weight), grad)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        torch.autograd.grad(run(x, weight), (x, weight), grad)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--recipes", default=",".join(get_args(Recipe)))
    parser.add_argument("--only", default="parity,speed")
    options = parser.parse_args()
    recipes, parts = options.recipes.split(","), options.only.split(",")
    fits = parity(options.models.split(","), options.plans.split(","), recipes) if "parity" in parts else True
    if "speed" in parts and torch.cuda.is_available():
        speed(recipes)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
