"""Optimisers of torch.optim as they are: accumulated gradients, clipping over all ranks, a schedule of rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import autopar
from tests.end_to_end.stacks import batch, stack
from tests.harness import run_ranks

STEPS, CALLS, NORM = 3, 2, 0.5

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(optim.AdamW, lr=0.01),
    "adamw fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "sgd momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": partial(optim.Adagrad, lr=0.01, fused=True),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "asgd": partial(optim.ASGD, lr=0.1),
}
# Those that need a parameter as a whole, which torch does not gather for them.
WHOLE: dict[str, Make] = {"adafactor": partial(optim.Adafactor, lr=0.01), "rprop": partial(optim.Rprop, lr=0.01)}

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 2},
}
Result = tuple[list[float], dict[str, Tensor]]


def _train(model: nn.Module, make: Make, step: Callable[[int], Any], clip: Callable[[], Tensor]) -> list[float]:
    """STEPS steps of CALLS batches each; the norm of the gradients in each."""
    optimizer = make(list(model.parameters()))
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1, cycle_momentum=False)
    norms = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for call in range(CALLS):
            step(CALLS * number + call)
        norms.append(float(clip()))
        optimizer.step()
        scheduler.step()
    return norms


def _alone(make: Make) -> Result:
    model = stack()
    norms = _train(
        model,
        make,
        lambda number: model(**batch(number)).backward(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), NORM),
    )
    return norms, {name: value.detach() for name, value in model.state_dict().items()}


def _together(names: list[str], constraints: dict[str, Any]) -> dict[str, Result]:
    found = {}
    for name in names:
        pm = autopar.parallelize(stack(), dist.get_world_size(), example_inputs=batch(), **constraints)
        make = (OPTIMIZERS | WHOLE)[name]

        def step(number: int, pm: autopar.ParallelModule = pm) -> None:
            pm.step(**pm.shard_batch(batch(number)))

        norms = _train(pm, make, step, partial(pm.clip_grad_norm_, NORM))
        found[name] = norms, pm.full_state_dict()
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_optimizers(plan: str) -> None:
    names = [*OPTIMIZERS, *(WHOLE if plan == "pp2" else ())]
    expected = {name: _alone((OPTIMIZERS | WHOLE)[name]) for name in names}
    for rank in run_ranks(_together, 2, names, PLANS[plan]):
        for name, (norms, state) in rank.items():
            assert norms == pytest.approx(expected[name][0], rel=1e-4), name
            for key, value in state.items():
                torch.testing.assert_close(value, expected[name][1][key], rtol=1e-4, atol=2e-5, msg=f"{name}: {key}")
