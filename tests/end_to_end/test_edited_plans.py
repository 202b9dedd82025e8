"""A plan edited by hand trains exactly, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.ir.errors import AutoparError
from autopar.ir.plan import Plan
from tests.end_to_end.stacks import Attention, FeedForward, batch, stack
from tests.harness import run_ranks

STEPS = 3


def _search() -> str:
    constraints = {"pp": 2, "tp": 2, "sp": False, "schedule": "1f1b", "num_microbatches": 2}
    return autopar.parallelize(stack(depth=4), 4, example_inputs=batch(), **constraints).plan.to_yaml()


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return Plan.from_yaml(run_ranks(_search, 4)[0]).model_dump(mode="json")


def _losses(fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses under the plan and alone, with SGD steps between."""
    plan = Plan.model_validate(fields)
    parallel = autopar.parallelize(stack(depth=4), dist.get_world_size(), example_inputs=batch(), plan=plan)
    alone = stack(depth=4)
    mine = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    own = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    found, expected = [], []
    for step in range(STEPS):
        mine.zero_grad()
        own.zero_grad()
        found.append(float(parallel.step(**parallel.shard_batch(batch(step)))))
        loss = alone(**batch(step))
        loss.backward()
        expected.append(float(loss.detach()))
        mine.step()
        own.step()
    return found, expected


def _refusal(fields: dict[str, Any], changed_model: bool = False) -> str:
    model = stack(Attention if changed_model else FeedForward, depth=4)
    try:
        plan = Plan.model_validate(fields)
        autopar.parallelize(model, dist.get_world_size(), example_inputs=batch(), plan=plan)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _refusals(cases: list[tuple[dict[str, Any], bool]]) -> list[str]:
    return [_refusal(*case) for case in cases]


def _trains_exactly(fields: dict[str, Any]) -> None:
    for found, expected in run_ranks(_losses, 4, fields):
        assert found == pytest.approx(expected, rel=1e-5)


def test_another_cut(plan: dict[str, Any]) -> None:
    last = plan["stages"][1]["last"]
    cut = plan["stages"][0]["last"]
    moved = cut + 1 if cut + 1 < last else cut - 1
    stages = [{"first": 0, "last": moved}, {"first": moved + 1, "last": last, "remat": {"full": 1}}]
    _trains_exactly(plan | {"stages": stages})


def test_another_factor_for_one_op(plan: dict[str, Any]) -> None:
    """The first matmul of a block on its input features, where the search put its output features."""
    blocks = [dict(block) for block in plan["blocks"]]
    repeated = next(block for block in blocks if block["repeats"] > 1)
    key = next(key for key in repeated["ops"] if key.startswith("up/"))
    assert repeated["ops"][key] == {"tp": "n"}
    repeated["ops"] = repeated["ops"] | {key: {"tp": "k"}}
    _trains_exactly(plan | {"blocks": blocks})


def test_refusals(plan: dict[str, Any]) -> None:
    repeated = next(number for number, block in enumerate(plan["blocks"]) if block["repeats"] > 1)

    def with_ops(ops: dict[str, Any]) -> dict[str, Any]:
        blocks = [dict(block) for block in plan["blocks"]]
        blocks[repeated]["ops"] = blocks[repeated]["ops"] | ops
        return plan | {"blocks": blocks}

    up = next(key for key in plan["blocks"][repeated]["ops"] if key.startswith("up/"))
    cases = [
        (
            with_ops({up: {"tp": "zebra"}}),
            False,
            ["InvalidPlan", "cannot be sharded on factor 'zebra'", "expected one of"],
        ),
        (
            with_ops({"up/linaer": {"tp": "n"}}),
            False,
            ["InvalidPlan", "has no op 'up/linaer'", "did you mean: up/linear"],
        ),
        (plan, True, ["PlanMismatch", "made for another model"]),
        (plan | {"mesh": {"tp": 4}}, False, ["PlanMismatch", "8"]),
    ]
    for messages in run_ranks(_refusals, 4, [case[:2] for case in cases]):
        for message, (_, _, words) in zip(messages, cases, strict=True):
            assert all(word in message for word in words), message
