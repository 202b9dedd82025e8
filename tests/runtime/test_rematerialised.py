"""What rematerialisation keeps for backward, measured, is what the cost model says."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.collective_counter import CollectiveCounter
from autopar.search.api import predict_plan
from tests.end_to_end.stacks import Attention, FeedForward, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks
from tests.runtime.held import Saved, held_bytes

DEPTH = 6
LEVELS: dict[str, dict[str, int]] = {
    "none": {},
    "selective": {"selective": DEPTH + 2},
    "full": {"full": DEPTH + 2},
    "some blocks": {"full": 3, "selective": 2},
}


def _kept(block: Any, ranks: int, sequence: bool, remat: dict[str, int]) -> tuple[float, float, float, Any]:
    """Bytes kept by a forward, predicted and measured, bytes gathered in the backward, and the gradients."""
    model, inputs = stack(block, DEPTH), batch()
    plan = tensor_parallel_plan(model, ranks, sequence=sequence)
    stage = plan.stages[0]
    assert stage.last + 1 == DEPTH + 2, "embedding, blocks, head"
    stages = [stage.model_copy(update={"remat": remat})]
    plan = plan.model_copy(update={"stages": stages})
    if ranks == 1:  # no op is placed anywhere
        plan = plan.model_copy(update={"mesh": {}, "blocks": [b.model_copy(update={"ops": {}}) for b in plan.blocks]})
    parallel = autopar.parallelize(model, ranks, example_inputs=inputs, plan=plan)
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", ranks, ranks), plan)
    parallel.step(**inputs)
    saved, measured = Saved(), list[float]()
    parallel.engine.stage.register_forward_hook(lambda *_: measured.append(held_bytes() - before))
    before = held_bytes()
    with saved, CollectiveCounter() as counter:
        parallel.step(**inputs)
    gathered = sum(one.sent_bytes for one in counter.select("all_gather", phase="backward"))
    return predicted.memory[0].activations, measured[0], gathered, parallel.full_gradients()


def _all_kept(block: Any, ranks: int, sequence: bool) -> dict[str, tuple[float, float, float, Any]]:
    return {name: _kept(block, ranks, sequence, remat) for name, remat in LEVELS.items()}


CASES = [
    pytest.param(FeedForward, None, id="mlp-one"),
    pytest.param(Attention, True, id="attention-tp2-sp"),
    pytest.param(FeedForward, False, id="mlp-tp2", marks=pytest.mark.slow),
    pytest.param(FeedForward, True, id="mlp-tp2-sp", marks=pytest.mark.slow),
    pytest.param(Attention, None, id="attention-one", marks=pytest.mark.slow),
    pytest.param(Attention, False, id="attention-tp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block", "sequence"), CASES)
def test_memory_falls_as_predicted(block: Any, sequence: bool | None) -> None:
    ranks = 1 if sequence is None else 2
    for found in run_ranks(_all_kept, ranks, block, ranks, bool(sequence)):
        for name, (predicted, measured, _, gradients) in found.items():
            assert measured == pytest.approx(predicted, rel=0.03), name
            for parameter, gradient in gradients.items():
                assert gradient.equal(found["none"][3][parameter]), (name, parameter)
        none, selective, full = (found[name][1] for name in ("none", "selective", "full"))
        assert full < 0.5 * none and full < selective < none
        if sequence:  # what a norm passes on is gathered anew for the backward, once a block
            assert found["selective"][2] == 2 * found["none"][2]
