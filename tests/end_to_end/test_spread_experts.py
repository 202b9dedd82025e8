"""Experts over tensor, context and data ranks at once, against one process: loss, gradients, parameters, and what is
sent."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.search.problem.forbidden_placements import Forbidden
from benchmarks.issued import compared
from benchmarks.models import CASES, build
from tests.harness import run_ranks
from tests.parity import relative

pytest.importorskip("transformers")

STEPS = 3
_NAMED = ("pp", "dp", "cp", "ep", "tp", "zero")
LAYERS = {"qwen3_moe": 2, "olmoe": 2, "deepseek_v3": 2, "mixtral": 4}


@dataclass(frozen=True)
class Cell:
    """A model under constraints, and the axes over which each expert is sent its tokens.

    sharded: axes that ZeRO works over. num_ranks: that the experts are spread over.
    """

    model: str
    constraints: dict[str, Any]
    axes: tuple[str, ...]
    num_ranks: int
    sharded: list[str] | None = None

    def __str__(self) -> str:
        given = (f"{name}{degree}" for name, degree in self.constraints.items() if name in _NAMED)
        return "-".join([self.model, *given])


FAST = [
    Cell("qwen3_moe", {"tp": 2, "ep": 4, "zero": 0}, ("ep", "tp"), 4),
    Cell("deepseek_v3", {"cp": 2, "ep": 4, "zero": 1, "shard": 4}, ("cp", "ep"), 4, ["cp", "ep"]),
    Cell("qwen3_moe", {"dp": 2, "tp": 2, "experts_within": ("tp",), "zero": 1}, ("tp",), 2, ["dp"]),
]
WIDE = [
    Cell("qwen3_moe", {"tp": 2, "ep": 4, "dp": 2, "zero": 1, "shard": 4}, ("ep", "tp"), 4, ["dp", "ep"]),
    Cell("qwen3_moe", {"cp": 2, "tp": 2, "ep": 8, "zero": 2, "shard": 4}, ("cp", "ep", "tp"), 8, ["cp", "ep"]),
    Cell(
        "olmoe",
        {"cp": 2, "tp": 2, "dp": 2, "experts_within": ("tp", "cp"), "zero": 1, "shard": 4},
        ("cp", "tp"),
        4,
        ["dp", "cp"],
    ),
    Cell("mixtral", {"cp": 2, "ep": 4, "dp": 2, "zero": 3, "shard": 8}, ("cp", "ep"), 4, ["dp", "cp", "ep"]),
    Cell("mixtral", {"pp": 2, "tp": 2, "ep": 4, "num_microbatches": 2, "zero": 1}, ("ep", "tp"), 4, ["ep"]),
]


@dataclass
class Trained:
    """Of each step the loss; after the last one all gradients and parameters. plan: that was run.

    all_to_alls: sizes of the groups of the all-to-alls of the last step, forward. wrong: where it sent otherwise than
    is recorded. own_experts: elements of experts that the rank stores.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    plan: autopar.Plan | None = None
    all_to_alls: list[int] | None = None
    wrong: list[str] | None = None
    own_experts: int = 0


def _parallel(cell: Cell) -> Trained:
    case, wrong = CASES[cell.model], list[str]()
    kept = [
        Forbidden(pattern="*/moe", placement=((axis, choice),))
        for axis in cell.axes
        for choice in ("experts", "d0", "d1", None)
    ]
    model = autopar.parallelize(
        build(case), dist.get_world_size(), example_inputs=case.batch(0), forbidden=tuple(kept), **cell.constraints
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, sizes = [], list[int]()
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = model.shard_batch(case.batch(step))
        if step == 1:
            with compared(model, wrong):
                losses.append(float(model.step(**rows)))
        else:
            with CollectiveCounter() as counter:
                losses.append(float(model.step(**rows)))
            sizes = [one.group_size for one in counter.select("all_to_all", phase="forward")]
        gradients = model.full_gradients()
        optimizer.step()
    local = (p.to_local() if hasattr(p, "to_local") else p for n, p in model.named_parameters() if ".experts." in n)
    own = sum(p.numel() for p in local)
    return Trained(losses, gradients, model.full_state_dict(), model.plan, sizes, wrong, own)


def _all(cells: list[Cell]) -> list[Trained]:
    return [_parallel(cell) for cell in cells]


def _alone(name: str) -> Trained:
    case = CASES[name]
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**case.batch(step)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Trained(losses, gradients, {n: p.detach() for n, p in model.named_parameters()})


def _check(cell: Cell, ranks: list[Trained]) -> None:
    expected = _alone(cell.model)
    experts = sum(p.numel() for name, p in expected.parameters.items() if ".experts." in name)
    for found in ranks:
        plan = found.plan
        assert plan is not None
        assert plan.shard_axes == cell.sharded
        chosen = [ops for block in plan.blocks for key, ops in block.ops.items() if key.endswith("/moe")]
        assert all(tuple(a for a, f in ops.items() if f.endswith("&experts")) == cell.axes for ops in chosen)
        assert found.wrong == []
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert relative(found.gradients, expected.gradients) < 1e-4
        assert relative(found.parameters, expected.parameters) < 1e-4
        # Divided over the ranks of the experts and, by ZeRO, over the data ranks that have no experts of their own.
        others = [axis for axis in cell.sharded or () if axis not in cell.axes]
        stages = plan.num_pipeline_ranks
        assert found.own_experts * stages == experts / cell.num_ranks / prod(plan.mesh[axis] for axis in others)
        # One to the experts and one back, a layer and microbatch, over all of their axes at once.
        sent = LAYERS[cell.model] * plan.batch.num_microbatches // stages
        assert (found.all_to_alls or []).count(cell.num_ranks) >= 2 * sent


@pytest.fixture(scope="module")
def on_four() -> list[list[Trained]]:
    return run_ranks(_all, 4, FAST)


@pytest.mark.parametrize("number", range(len(FAST)), ids=map(str, FAST))
def test_experts_on_four_ranks_train_as_in_one_process(number: int, on_four: list[list[Trained]]) -> None:
    _check(FAST[number], [rank[number] for rank in on_four])


@pytest.fixture(scope="module")
def on_eight() -> list[list[Trained]]:
    return run_ranks(_all, 8, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WIDE)), ids=map(str, WIDE))
def test_experts_on_eight_ranks_train_as_in_one_process(number: int, on_eight: list[list[Trained]]) -> None:
    _check(WIDE[number], [rank[number] for rank in on_eight])
