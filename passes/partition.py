"""Partitioning: from a placed model to one program per pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autopar.ir.errors import PlanMismatch
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.program import StageProgram
from autopar.passes.contract import Pass
from autopar.passes.insert_redistributions import NAME, insert_redistributions
from autopar.passes.localise_shapes import LocaliseShapes
from autopar.passes.lower_ops import LowerOps
from autopar.passes.lower_redistributions import LowerRedistributions
from autopar.passes.narrow_compute import NarrowCompute
from autopar.passes.narrow_gathers import NarrowGathers
from autopar.passes.placed_program import PlacedProgram, run_program_passes
from autopar.passes.split_stages import split_stages

PASSES: tuple[Pass[PlacedProgram], ...] = (
    LocaliseShapes(),
    LowerOps(),
    LowerRedistributions(),
    NarrowGathers(),
    NarrowCompute(),
)


def partition(
    placed: PlacedModel,
    *,
    outputs: Literal["loss", "model"] = "loss",
    after: Callable[[str, PlacedProgram], None] = lambda name, program: None,
) -> tuple[StageProgram, ...]:
    """The local program of every stage of a placed model.

    outputs: "loss" for a training step (the captured loss alone), "model" for a plain forward. after: called with the
    name of each pass and the program that it makes. Raises PlanMismatch, saying why the plan does not fit the model.
    """
    captured = placed.captured
    if outputs == "loss" and not captured.has_loss:
        raise PlanMismatch(
            f"{captured.name} has no loss: its output is not a scalar and has no .loss.\n"
            "  try: pass loss_fn=..., or labels among the example inputs"
        )
    program = insert_redistributions(placed, outputs)
    after(NAME, program)
    program = run_program_passes(program, PASSES, after=after)
    return split_stages(program)
