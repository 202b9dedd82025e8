"""Dtypes of a local program under narrow compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.analysis.matrix_products import is_product
from autopar.ir.capture.capture import capture
from autopar.ir.ops import composite
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.torch_private import TO_COPY
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


class Residual(nn.Module):
    """The norm divides the sequence of its input, which comes whole and in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def test_a_part_of_a_step_input_is_cast_too() -> None:
    captured = normalise(capture(Residual(), torch.randn(2, 8, 16)))
    constraints = Constraints(tp=2, precision="bf16", sequence_parallel=True)
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), constraints).plan
    (stage,) = partition(place_captured(captured, plan))
    nodes = [node for block in stage.blocks for node in block.graph.nodes]
    (norm,) = (node for node in nodes if node.target is composite.rms_norm)
    assert norm.args[0].target is TO_COPY and norm.args[0].args[0].meta["val"].shape == (2, 4, 16)
    assert norm.meta["val"].dtype == torch.bfloat16


class Attention(nn.Module):
    """Eager attention: a softmax in float32, cast back for the product with the values, which is lost in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).transpose(1, 2)).tanh()
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return (weights @ self.value(x)).square().mean()


def test_a_product_takes_what_was_computed_in_float32() -> None:
    captured = normalise(capture(Attention(), torch.randn(2, 8, 16)))
    plan = estimate_captured(captured, make_cluster("cpu", 2, 2), Constraints(dp=2, precision="bf16")).plan
    (stage,) = partition(place_captured(captured, plan))
    nodes = [node for block in stage.blocks for node in block.graph.nodes]
    wide = [node for node in nodes if node.target is TO_COPY and "softmax" in str(node.args[0])]
    assert wide and {node.args[0].meta["val"].dtype for node in wide} == {torch.float32}
    assert {node.meta["val"].dtype for node in nodes if is_product(node.target)} == {torch.bfloat16}
