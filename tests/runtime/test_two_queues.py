"""The pairs of DualPipeV run at once, with the results of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.ir.primitives import group_communication
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.runtime.two_queues import BackwardThread
from tests.end_to_end.stacks import Attention, batch, stack
from tests.harness import run_ranks

DEPTH, RANKS = 6, 4


class Dropping(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def _trained(block: type[nn.Module], constraints: dict[str, Any]) -> dict[str, Any]:
    """One step, watched by nobody, and one that a mode watches."""
    at_once, over = 0, set[str]()
    apart, hand = BackwardThread._apart, group_communication.group_at_hand

    def counted(self: BackwardThread, *args: Any) -> None:
        nonlocal at_once
        at_once += 1
        apart(self, *args)

    def seen(group: str) -> str:
        over.add(hand(group))
        return hand(group)

    inputs = batch()
    plan = autopar.search(
        stack(block, DEPTH),
        RANKS,
        example_inputs=inputs,
        pp=2,
        num_microbatches=4,
        schedule="dualpipe-v",
        **constraints,
    )
    parallel = autopar.parallelize(stack(block, DEPTH), RANKS, example_inputs=inputs, plan=plan)
    with (
        mock.patch.object(BackwardThread, "_apart", counted),
        mock.patch.object(group_communication, "group_at_hand", seen),
    ):
        loss = parallel.step(**parallel.shard_batch(inputs))
        gradients, unwatched = parallel.full_gradients(), at_once
        parallel.zero_grad()
        with CollectiveCounter() as counter:
            again = parallel.step(**parallel.shard_batch(inputs))
    alike = all(torch.equal(value, gradients[name]) for name, value in parallel.full_gradients().items())
    return {
        "loss": loss,
        "gradients": gradients,
        "at once": unwatched,
        "watched": at_once - unwatched,
        "groups": len(over),
        "sent": len(list(counter.select("all_reduce"))),
        "alike": alike and torch.equal(loss, again),
        "pairs": 4 if dist.get_rank() >= RANKS // 2 else 3,
    }


@pytest.mark.parametrize(
    "constraints",
    [
        pytest.param({"tp": 2, "sp": False, "remat": "full"}, id="tp2"),
        # Gradients are summed over the groups that the sequence is divided over.
        pytest.param({"cp": 2, "zero": 2}, id="cp2-zero2"),
    ],
)
def test_a_backward_runs_beside_a_forward(constraints: dict[str, Any]) -> None:
    model = stack(Attention, DEPTH)
    loss = model(**batch())
    loss.backward()
    for found in run_ranks(_trained, RANKS, Attention, constraints):
        assert found["at once"] == found["pairs"], "pairs that ran at once"
        assert found["groups"] == 2, "a group for each"
        assert found["watched"] == 0 and found["alike"], "what is watched runs one after the other, and is the same"
        assert found["sent"] or "cp" in constraints
        torch.testing.assert_close(found["loss"], loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_what_draws_random_numbers_runs_one_after_the_other() -> None:
    for found in run_ranks(_trained, RANKS, Dropping, {"tp": 2, "sp": False}):
        assert found["at once"] == 0
        assert found["groups"] == 1


def _with_an_error() -> str:
    inputs = batch()
    given: dict[str, Any] = {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "dualpipe-v"}
    plan = autopar.search(stack(Attention, DEPTH), RANKS, example_inputs=inputs, **given)
    parallel = autopar.parallelize(stack(Attention, DEPTH), RANKS, example_inputs=inputs, plan=plan)

    def fail(*_: Any) -> None:
        raise ArithmeticError("in a backward")

    with (
        mock.patch.object(BackwardThread, "_apart", fail),
        pytest.raises(ArithmeticError, match="in a backward") as raised,
    ):
        parallel.step(**parallel.shard_batch(inputs))
    return str(raised.value)


def test_an_error_of_the_other_thread_is_raised() -> None:
    assert run_ranks(_with_an_error, RANKS) == ["in a backward"] * RANKS
