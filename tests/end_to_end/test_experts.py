"""Unmodified models with experts on meshes of experts, data, tensors and stages, against one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from benchmarks.models import CASES, build
from tests.harness import run_ranks

pytest.importorskip("transformers")

STEPS = 2

# Model, constraints, microbatches and layers of experts per stage.
PLANS: list[tuple[str, dict[str, Any], int, int]] = [
    ("mixtral_aux", {"ep": 2, "dp": 2, "zero": 0}, 1, 4),
    ("deepseek_v3", {"ep": 2, "tp": 2}, 1, 2),
    ("olmoe", {"ep": 2, "pp": 2, "num_microbatches": 2}, 2, 1),
    ("qwen3_moe", {"ep": 2, "dp": 2, "zero": 3}, 1, 2),
    ("mixtral", {"ep": 2, "dp": 2, "zero": 0, "expert_capacity": 1.0}, 1, 4),
]


@dataclass
class Trained:
    """Of each step: loss, all_to_alls by phase, tokens by layer and expert; and after the last one all tensors."""

    losses: list[float]
    all_to_alls: list[tuple[int, int]]
    loads: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    dispatched: bool


def _parallel(name: str, constraints: dict[str, Any]) -> Trained:
    case = CASES[name]
    model = autopar.parallelize(build(case), dist.get_world_size(), example_inputs=case.batch(0), **constraints)
    chosen = {f for block in model.plan.blocks for axes in block.ops.values() for f in axes.values()}
    found = Trained([], [], [], {}, {}, any(f.endswith("&experts") for f in chosen))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        with CollectiveCounter() as counter:
            found.losses.append(float(model.step(**model.shard_batch(case.batch(step)))))
        all_to_alls = counter.count("all_to_all", phase="forward"), counter.count("all_to_all", phase="backward")
        found.all_to_alls.append(all_to_alls)
        found.loads.append(model.expert_load())
        found.gradients = model.full_gradients()
        optimizer.step()
    found.parameters = model.full_state_dict()
    return found


def _all(plans: list[tuple[str, dict[str, Any]]]) -> list[Trained]:
    return [_parallel(*plan) for plan in plans]


def _admitted(index: Tensor, num_experts: int, factor: float) -> Tensor:
    """Whether each choice is among those that its expert takes, in order of tokens."""
    taken, capacity = [0] * num_experts, math.ceil(factor * index.numel() / num_experts)
    admitted = []
    for expert in index.flatten().tolist():
        admitted.append(taken[expert] < capacity)
        taken[expert] += 1
    return torch.tensor(admitted).view_as(index)


def _alone(name: str, capacity: float | None) -> Trained:
    case = CASES[name]
    model = build(case)
    loads: dict[str, Tensor] = {}

    def watch(path: str, experts: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x, index, weight = args
        loads[path] = torch.bincount(index.flatten(), minlength=experts.num_experts)
        if capacity is None:
            return None
        return x, index, weight * _admitted(index, experts.num_experts, capacity)

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args, path=path: watch(path, module, args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = Trained([], [], [], {}, {}, False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**case.batch(step)).loss
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.loads.append(dict(loads))
        found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    found.parameters = {n: p.detach() for n, p in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[list[Trained]]:
    return run_ranks(_all, 4, [plan[:2] for plan in PLANS])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANS)), ids=[f"{name}-{mesh}" for name, mesh, *_ in PLANS])
def test_experts_on_every_mesh(number: int, ranks: list[list[Trained]]) -> None:
    name, constraints, microbatches, layers = PLANS[number]
    expected = _alone(name, constraints.get("expert_capacity"))
    for found in (rank[number] for rank in ranks):
        assert found.dispatched
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        for load, alone in zip(found.loads, expected.loads, strict=True):
            assert {path: counts.tolist() for path, counts in load.items()} == {
                path: counts.tolist() for path, counts in alone.items()
            }
        # Twice a layer and microbatch, each way. Other all_to_alls would be redistributions: there are none.
        assert set(found.all_to_alls) == {(2 * layers * microbatches, 2 * layers * microbatches)}
    first = ranks[0][number]
    for tensors, others in ((first.gradients, expected.gradients), (first.parameters, expected.parameters)):
        for path, value in others.items():
            torch.testing.assert_close(tensors[path], value, rtol=1e-4, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}")


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    case = CASES["mixtral_aux"]
    return normalise(capture(build(case), case.batch(0)))


def test_an_auxiliary_loss_over_the_batch_refuses_microbatches(captured: CapturedModel) -> None:
    with pytest.raises(InfeasiblePlan, match=r"sum over the whole batch(.|\n)*load_balancing_loss_func"):
        search_captured(captured, make_cluster("a100-80gb", 2), Constraints(num_microbatches=2))


@pytest.mark.parametrize(("name", "degree", "words"), [("mixtral_aux", 8, "try: --ep 4"), ("mlp", 2, "no experts")])
def test_refused_degrees(name: str, degree: int, words: str) -> None:
    case = CASES[name]
    example = case.batch(0)
    target = example.pop("target", None)
    model = normalise(capture(build(case), example, loss_fn=case.loss_fn, example_target=target))
    with pytest.raises(InfeasiblePlan, match=words):
        search_captured(model, make_cluster("a100-80gb", 8), Constraints(ep=degree))


@pytest.mark.parametrize(("microbatches", "choice"), [(None, "d0&experts"), (4, "experts")])
def test_the_axis_of_experts_divides_the_batch_where_it_can(microbatches: int | None, choice: str) -> None:
    """Eight samples on ep=8 divide in one microbatch, and leave every rank with all tokens in four."""
    case = CASES["olmoe"]
    model = normalise(capture(build(case), case.batch(0)))
    constraints = Constraints(ep=8, num_microbatches=microbatches)
    plan = search_captured(model, make_cluster("a100-80gb", 8), constraints).plan
    chosen = [axes["ep"] for block in plan.blocks for key, axes in block.ops.items() if key.endswith("/moe")]
    assert chosen == [choice]
