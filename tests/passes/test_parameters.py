"""Where parameters are stored, and what ZeRO may shard over."""

from __future__ import annotations

import pytest

from autopar.ir.capture.capture import capture
from autopar.ir.errors import PlanMismatch
from autopar.ir.placed.placed_model import place_captured
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from tests.end_to_end.stacks import batch, stack, tensor_parallel_plan


def test_zero_does_not_shard_what_is_sharded() -> None:
    model = stack()
    plan = tensor_parallel_plan(model, 2, sequence=False).model_copy(update={"zero": 1, "shard_axes": ["tp"]})
    with pytest.raises(PlanMismatch, match=r"cannot shard over mesh axis 'tp', on which parameter blocks\.0\.up"):
        partition(place_captured(normalise(capture(model, batch())), plan))
