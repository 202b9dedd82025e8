"""Programs of small models under plans, for tests of the proof."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from autopar.api import constraints_of
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import search_captured


@cache
def captured_case(name: str) -> CapturedModel:
    """The model of ``tests.cases``, captured once."""
    case = importlib.import_module(f"tests.cases.{name}")
    torch.manual_seed(0)
    extra: dict[str, Any] = {}
    if hasattr(case, "loss_fn"):
        extra = {"loss_fn": case.loss_fn, "example_target": case.target(0)}
    return normalise(capture(case.model(), case.batch(0), **extra), check=False)


def programs_of(
    captured: CapturedModel, ranks: int, constraints: dict[str, Any]
) -> tuple[Plan, tuple[StageProgram, ...]]:
    """The plan that the search finds within ``constraints``, and its programs."""
    plan = search_captured(captured, local_cluster(ranks, torch.device("cpu")), constraints_of(constraints)).plan
    outputs: Any = "loss" if captured.has_loss else "model"
    return plan, partition(place_captured(captured, plan), outputs=outputs)
