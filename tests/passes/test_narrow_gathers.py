"""What the pass narrow-gathers makes of a block under sequence parallelism, and what it leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.capture.capture import capture
from autopar.ir.graph import call_nodes
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.primitives.collectives import all_gather, reduce_scatter
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from examples.gpt import GPT, Config
from tests.harness import run_ranks
from tests.parity import with_norms_in_parts


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(Config(width=32, num_layers=2, num_heads=4, num_kv_heads=4, hidden=64, vocabulary=32))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 32, (4, 8), generator=generator) for _ in range(2))
    return first, second


def plan_of(precision: str) -> Plan:
    """Tensor and sequence parallel on two ranks."""
    how = {"tp": 2, "sp": True, "num_microbatches": 1, "precision": precision}
    return with_norms_in_parts(autopar.search(model(), 2, example_inputs=batch(), **how))


def counts(precision: str) -> dict[str, int]:
    """Collectives of each kind in the blocks of two layers."""
    captured = normalise(capture(model(), batch()))
    (program,) = partition(place_captured(captured, plan_of(precision)))
    kinds = (all_gather, narrow_all_gather, reduce_scatter, narrowing_reduce_scatter)
    nodes = [node for block in program.blocks for node in call_nodes(block.graph)]
    return {kind.__name__: sum(node.target is kind for node in nodes) for kind in kinds}


def test_what_products_by_tensor_read_is_gathered_in_8_bits() -> None:
    wide, narrow = counts("bf16"), counts("fp8-tensor")
    # Of each layer the inputs of attention and of the MLP, and the gradients of the results of both.
    assert narrow["narrow_all_gather"] == narrow["narrowing_reduce_scatter"] == 4
    assert wide["all_gather"] == narrow["all_gather"] + 4
    assert wide["reduce_scatter"] == narrow["reduce_scatter"] + 4


def test_by_row_backward_reads_others() -> None:
    assert counts("fp8-row") == counts("bf16")


def train(precision: str, compiled: bool) -> tuple[list[float], int]:
    """Losses of two steps, and the bytes that the second gathers."""
    plan = plan_of(precision)
    parallel = autopar.parallelize(model(), 2, example_inputs=batch(), compile=compiled, plan=plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        with CollectiveCounter() as counter:
            losses.append(float(parallel.step(*parallel.shard_batch(batch()))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, sum(one.payload_bytes for one in counter.select("all_gather"))


def test_half_the_bytes_are_gathered() -> None:
    (_, eight), (_, sixteen) = (run_ranks(train, 2, name, False)[0] for name in ("fp8-tensor", "bf16"))
    # Forward and backward, twice in each of two layers, of 4 x 8 positions of 32 numbers.
    assert sixteen - eight == 2 * 2 * 2 * (4 * 8 * 32)


@pytest.mark.slow
def test_a_compiled_step_is_the_same() -> None:
    compiled, plain = (run_ranks(train, 2, "fp8-tensor", own)[0][0] for own in (True, False))
    assert compiled == pytest.approx(plain, rel=1e-3)
