"""What rematerialisation keeps for backward, measured, is what the cost model says."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.cost_model.catalogue import make_cluster
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


def _kept(block: Any, remat: dict[str, int]) -> tuple[float, float, Any]:
    """Bytes kept by a forward, predicted and measured, and the gradients."""
    model, inputs = stack(block, DEPTH), batch()
    plan = tensor_parallel_plan(model, 1, sequence=False)
    stage = plan.stages[0]
    assert stage.last + 1 == DEPTH + 2, "embedding, blocks, head"
    # One rank, so no op is placed anywhere.
    blocks = [kind.model_copy(update={"ops": {}}) for kind in plan.blocks]
    stages = [stage.model_copy(update={"remat": remat})]
    plan = plan.model_copy(update={"mesh": {}, "blocks": blocks, "stages": stages})
    parallel = autopar.parallelize(model, 1, example_inputs=inputs, plan=plan)
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", 1, 1), plan)
    parallel.step(**inputs)
    saved, measured = Saved(), list[float]()
    parallel.engine.stage.register_forward_hook(lambda *_: measured.append(held_bytes() - before))
    before = held_bytes()
    with saved:
        parallel.step(**inputs)
    return predicted.memory[0].activations, measured[0], parallel.full_gradients()


def _all_kept(block: Any) -> dict[str, tuple[float, float, Any]]:
    return {name: _kept(block, remat) for name, remat in LEVELS.items()}


@pytest.mark.parametrize("block", [FeedForward, Attention])
def test_memory_falls_as_predicted(block: Any) -> None:
    (found,) = run_ranks(_all_kept, 1, block)
    for name, (predicted, measured, gradients) in found.items():
        assert measured == pytest.approx(predicted, rel=0.03), name
        for parameter, gradient in gradients.items():
            assert gradient.equal(found["none"][2][parameter]), (name, parameter)
    none, selective, full = (found[name][1] for name in ("none", "selective", "full"))
    assert full < 0.5 * none and full < selective < none
