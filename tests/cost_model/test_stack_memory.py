"""What software stacks keep in memory: the state that their documentation states, and peaks of plans on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.memory.model_state import state_memory
from autopar.cost_model.stacks import known_memory
from autopar.cost_model.stacks.known import MEGATRON_CORE, MEGATRON_LM, NANOTRON, STACKS, ZERO_BUBBLE
from autopar.cost_model.stacks.memory import StackMemory
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints
from tests.end_to_end.stacks import Attention, batch, stack

N = 1000.0


@pytest.mark.parametrize(
    ("memory", "precision", "whole", "fixed", "divided"),
    [
        # Megatron-Core's documentation of its distributed optimiser.
        (known_memory.MEGATRON_LM, "fp16", 20, 4, 16),
        (known_memory.MEGATRON_LM, "bf16", 18, 6, 12),
        (known_memory.MEGATRON_LM, "fp32", 16, 8, 8),
        # With gradients reduced in 16 bits.
        (known_memory.MEGATRON_CORE, "bf16", 20, 4, 16),
    ],
)
def test_bytes_a_parameter_with_and_without_a_distributed_optimiser(
    memory: StackMemory, precision: str, whole: int, fixed: int, divided: int
) -> None:
    def state(zero: int, ranks: int) -> float:
        return state_memory(N, zero=zero, data_size=ranks, precision=precision, stack=memory).total

    assert state(0, 8) == whole * N
    assert state(1, 8) == (fixed + divided / 8) * N
    # One microbatch a step changes nothing: the buffer of gradients stays.
    assert state_memory(N, zero=1, data_size=8, precision=precision, num_microbatches=1, stack=memory).total == state(
        1, 8
    )


def test_buckets_of_data_parallel_ranks_add_a_gradient_as_computed() -> None:
    def state(reduced: bool) -> float:
        memory = known_memory.NANOTRON
        return state_memory(N, zero=1, data_size=4, precision="bf16", stack=memory, reduced=reduced).total

    assert (state(False), state(True)) == (9 * N, 11 * N)


def test_full_sharding_is_as_ours() -> None:
    for memory in (known_memory.MEGATRON_CORE, known_memory.TORCHTITAN):
        assert state_memory(N, zero=3, data_size=4, precision="bf16", stack=memory).total == 4 * N


def test_every_stack_says_where_its_memory_is_from() -> None:
    assert all(stack.memory.why for stack in STACKS.values())
    # Losses in chunks and wide layers in tiles are of our own runtime.
    assert {name for name, stack in STACKS.items() if stack.memory.divides} == {"autopar", "autopar-compiled"}


@cache
def captured() -> CapturedModel:
    torch.manual_seed(0)
    return normalise(capture(stack(Attention, 6), batch()))


def predicted(software: Stack, **limits: object) -> Predicted:
    ranks = int(str(limits.get("pp", 1))) * int(str(limits.get("tp", 1)))
    cluster = make_cluster("h100-sxm", ranks, stack=software)
    constraints = Constraints(precision="bf16", remat="none", **limits)  # type: ignore[arg-type]
    return estimate_captured(captured(), cluster, constraints).predicted


def with_memory(software: Stack, **changes: object) -> Stack:
    return replace(software, memory=replace(software.memory, **changes))  # type: ignore[arg-type]


def test_gathering_again_takes_less_memory_and_no_less_time() -> None:
    limits = {"tp": 4, "sequence_parallel": True, "zero": 0, "num_microbatches": 1}
    kept = predicted(with_memory(MEGATRON_LM, regathers=False), **limits)
    again = predicted(MEGATRON_LM, **limits)
    assert again.peak_bytes < kept.peak_bytes
    # The gathers of a model this small are not hidden by products.
    assert again.step_time_s > kept.step_time_s


def test_a_split_backward_that_releases_early_holds_what_1f1b_holds() -> None:
    limits = {"pp": 2, "schedule": "zb-h1", "num_microbatches": 4, "zero": 0}
    late, early = (predicted(software, **limits) for software in (MEGATRON_LM, ZERO_BUBBLE))
    assert early.peak_bytes < late.peak_bytes
    # Without a split nothing differs.
    limits["schedule"] = "1f1b"
    late, early = (predicted(software, **limits) for software in (MEGATRON_LM, ZERO_BUBBLE))
    assert early.memory == late.memory


def test_the_reserve_is_the_share_of_the_stack() -> None:
    for software in (MEGATRON_CORE, NANOTRON):
        parts = predicted(software, zero=0, num_microbatches=1).memory[0]
        assert parts.workspace == pytest.approx(software.memory.fragmentation * parts.activations)
