"""Blocks of one rank's program: what leaves a block whose parameters are freed."""

from __future__ import annotations

import pytest
import torch

from autopar.api import constraints_of
from autopar.ir.capture.capture import capture
from autopar.ir.placed.placed_model import place_captured
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import search_captured
from tests.cases import disentangled_attention as positions_of_all_layers

aten = torch.ops.aten


@pytest.mark.parametrize(("zero", "result"), [(3, aten.clone.default), (2, aten.unsqueeze.default)])
def test_a_view_of_a_parameter_outlives_the_block_that_frees_it(zero: int, result: object) -> None:
    """The table of positions is read in the first block and used by every layer, when ZeRO-3 has resharded it."""
    model, batch = positions_of_all_layers.model(), positions_of_all_layers.batch(0)
    captured = normalise(capture(model, batch))
    limits = constraints_of({"dp": 2, "zero": zero})
    plan = search_captured(captured, local_cluster(2, torch.device("cpu")), limits).plan
    (program,) = partition(place_captured(captured, plan))
    first = next(block for block in program.blocks if "positions.weight" in block.parameters)
    returned = next(iter(reversed(first.graph.nodes))).args[0]
    assert isinstance(returned, tuple)
    assert [node.target for node in returned if isinstance(node, torch.fx.Node)] == [aten.embedding.default, result]
