"""Dtypes of a local program under narrow compute."""

from __future__ import annotations

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.placed.placed_model import place_captured
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from tests.cases import scanned


def test_a_part_of_what_comes_from_outside_a_block_is_cast_too() -> None:
    """The state that a scan starts from is zeros made outside of it, of which a tensor rank takes its channels."""
    captured = normalise(capture(scanned.model(), scanned.batch(0)))
    constraints = Constraints(tp=2, precision="bf16")
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), constraints).plan
    (stage,) = partition(place_captured(captured, plan))
    nodes = [node for block in stage.blocks for node in block.graph.nodes]
    scans = [node for node in nodes if node.name.startswith(("scan", "associative_scan"))]
    assert len(scans) == 3
    assert {value.dtype for node in scans for value in node.meta["val"]} == {torch.bfloat16}
