"""Prices of gathers in 8 bits: by their bytes, on stacks that have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.casts import spared_by_gather
from autopar.cost_model.stacks.known import AUTOPAR, COMPILED, MEGATRON_CORE_2025, TORCHTITAN
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.placed.step_communication import step_communication
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, prices_of
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult
from examples.gpt import GPT, Config

LAYERS, WIDTH, HIDDEN, KV = 4, 4096, 14336, 1024
WEIGHTS = 2 * WIDTH * WIDTH + 2 * WIDTH * KV + 3 * WIDTH * HIDDEN


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    with torch.device("meta"):
        config = Config(width=WIDTH, num_layers=LAYERS, num_heads=32, num_kv_heads=8, hidden=HIDDEN)
        model: nn.Module = GPT(config)
        tokens = torch.zeros(16, 4096, dtype=torch.long)
        return normalise(capture(model, (tokens, tokens)))


def estimated(captured: CapturedModel, *, narrow: bool, recipe: str = "fp8-tensor", **how: Any) -> SearchResult:
    what = COMPILED.gathers_narrow if narrow else frozenset()
    cluster = make_cluster("h100-sxm", 16, stack=replace(COMPILED, gathers_narrow=what))
    given = Constraints(precision="bf16", recipes=(recipe,), num_microbatches=1, remat="none", **how)  # type: ignore[arg-type]
    return estimate_captured(captured, cluster, given)


def gathered_bytes(captured: CapturedModel, found: SearchResult) -> float:
    records = step_communication(place_captured(captured, found.plan))
    return sum(r.payload_bytes * r.times for r in records if r.kind == "all_gather" and r.cause == "parameter")


def test_weights_under_zero_are_gathered_and_held_in_half_the_bytes(captured: CapturedModel) -> None:
    held = {"zero": 3, "dp": 16, "reshard_after_forward": False}
    wide, narrow = (estimated(captured, narrow=own, **held) for own in (False, True))
    of_row = estimated(captured, narrow=True, recipe="fp8-row", **held)
    assert gathered_bytes(captured, of_row) - gathered_bytes(captured, narrow) == LAYERS * WEIGHTS
    saved = wide.predicted.peak_bytes - narrow.predicted.peak_bytes
    # The allocator's reserve is in proportion.
    assert LAYERS * WEIGHTS <= saved <= 1.2 * LAYERS * WEIGHTS
    assert narrow.predicted.step_time_s < wide.predicted.step_time_s


def test_what_is_gathered_for_a_pass_takes_less_time(captured: CapturedModel) -> None:
    wide, narrow = (estimated(captured, narrow=own, zero=3, dp=16).predicted for own in (False, True))
    assert narrow.breakdown_s["gradient_sync"] < wide.breakdown_s["gradient_sync"]
    # Weights are cast by piece, so that products have less to cast.
    assert narrow.breakdown_s["compute"] < wide.breakdown_s["compute"]


def test_activations_over_tensor_ranks_take_less_time(captured: CapturedModel) -> None:
    how = {"tp": 8, "dp": 2, "zero": 0, "sequence_parallel": True}
    wide, narrow = (estimated(captured, narrow=own, **how).predicted for own in (False, True))
    # Of four collectives of as many bytes in forward and backward two are gathers.
    assert 0.7 < narrow.breakdown_s["communication_tp"] / wide.breakdown_s["communication_tp"] < 0.85


def test_by_row_nothing_changes(captured: CapturedModel) -> None:
    how = {"recipe": "fp8-row", "zero": 3, "dp": 2, "tp": 8, "sequence_parallel": True}
    wide, narrow = (estimated(captured, narrow=own, **how).predicted for own in (False, True))
    assert narrow.step_time_s == wide.step_time_s and narrow.peak_bytes == wide.peak_bytes


def test_a_search_over_zero_stages_prices_each_as_it_is(captured: CapturedModel) -> None:
    cluster = make_cluster("h100-sxm", 16, stack=TORCHTITAN)
    given = Constraints(precision="bf16", recipes=("fp8-tensor",), num_microbatches=1, remat="none", dp=16)
    alone = {zero: estimate_captured(captured, cluster, replace(given, zero=zero)) for zero in (3, 0)}
    prices = prices_of(Workload.for_plan(captured, alone[3].plan), cluster, given)
    for zero in (3, 0, 3):
        found = estimate_captured(captured, cluster, replace(given, zero=zero), prices=prices)
        assert found.predicted.step_time_s == alone[zero].predicted.step_time_s


def test_stacks_that_gather_in_8_bits() -> None:
    for stack in (AUTOPAR, COMPILED, TORCHTITAN):
        assert stack.gathers_narrow == {"weights", "activations"}
    assert MEGATRON_CORE_2025.gathers_narrow == {"activations"}


def test_casts_that_are_left_of_a_weight() -> None:
    tensor = SCALINGS["fp8-tensor"]
    compiled = make_cluster("h100-sxm", 1, stack=TORCHTITAN).device
    # Read for its maximum, read and written forward, and so again backward; a copy in another order is left.
    assert spared_by_gather(compiled, tensor, 2, backward=True) == (2 * 2 + 1, 2 + 1 - 2)
    assert spared_by_gather(compiled, tensor, 2, backward=False) == (2 * 2 + 1, 0)
    once = make_cluster("h100-sxm", 1, stack=MEGATRON_CORE_2025).device
    assert spared_by_gather(once, tensor, 2, backward=True) == (0, 0)
