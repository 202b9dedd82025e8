"""Blocks that keep what a plan lists: gradients as of blocks that keep everything, and memory as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.search.api import predict_plan
from tests.end_to_end.stacks import Attention, FeedForward, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks
from tests.runtime.held import kept_by_a_step
from tests.runtime.kept_plans import plans_that_keep

DEPTH = 3


def plan_of(block: Any, ranks: int, sequence: bool) -> Plan:
    plan = tensor_parallel_plan(stack(block, DEPTH), ranks, sequence=sequence)
    if ranks == 1:  # no op is placed anywhere
        plan = plan.model_copy(update={"mesh": {}, "blocks": [b.model_copy(update={"ops": {}}) for b in plan.blocks]})
    return plan


def measured(block: Any, ranks: int, sequence: bool, compiled: bool = False) -> dict[str, Any]:
    """Of each plan: bytes kept by a forward, predicted and measured, bytes gathered in the backward, and gradients."""
    model, inputs, plan = stack(block, DEPTH), batch(), plan_of(block, ranks, sequence)
    whole = autopar.parallelize(model, ranks, example_inputs=inputs, plan=plan)
    found = {}
    cluster = make_cluster("cpu", ranks, ranks)
    every = {"everything": plan} | plans_that_keep(plan, whole.engine.captured, cluster)
    for name, own in every.items():
        parallel = autopar.parallelize(stack(block, DEPTH), ranks, example_inputs=inputs, plan=own, compile=compiled)
        predicted = predict_plan(parallel.engine.captured, cluster, own)
        parallel.step(**inputs)
        with CollectiveCounter() as counter:
            kept = kept_by_a_step(parallel, inputs)
        gathered = sum(one.sent_bytes for one in counter.select("all_gather", phase="backward"))
        found[name] = predicted.kept_bytes[0], kept, gathered, parallel.full_gradients()
    return found


CASES = [
    pytest.param(FeedForward, None, id="mlp-one"),
    pytest.param(Attention, True, id="attention-tp2-sp"),
    pytest.param(FeedForward, True, id="mlp-tp2-sp", marks=pytest.mark.slow),
    pytest.param(Attention, None, id="attention-one", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block", "sequence"), CASES)
def test_gradients_and_memory(block: Any, sequence: bool | None) -> None:
    ranks = 1 if sequence is None else 2
    for found in run_ranks(measured, ranks, block, ranks, bool(sequence)):
        assert len(found) > 2
        before = None
        for name, (predicted, kept, _, gradients) in found.items():
            assert kept == pytest.approx(predicted, rel=0.03), name
            assert before is None or kept < before, name
            before = kept
            for parameter, gradient in gradients.items():
                assert gradient.equal(found["everything"][3][parameter]), (name, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("block", [FeedForward, Attention])
def test_compiled_blocks_keep_the_same(block: Any) -> None:
    (plain,) = run_ranks(measured, 1, block, 1, False)
    (compiled,) = run_ranks(measured, 1, block, 1, False, True, idle_s=600.0, limit_s=900.0)
    expected = plain["everything"][3]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, (predicted, kept, _, gradients) in compiled.items():
        assert kept == pytest.approx(predicted, rel=0.03), name
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-6 * largest)
