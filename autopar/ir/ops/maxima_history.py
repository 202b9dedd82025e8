"""The largest magnitudes of earlier steps, of which scales follow in delayed scaling.

    rows       input, weight, gradient of the result
    columns    0: largest so far in this step    1: of all steps before, as far as it goes back    2..: step by step

Every product of a step has the same scales, whatever its microbatch, so that none waits for another rank: ranks agree
once a step, when it has ended (``roll``). Where nothing is known yet a scale is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.ops.quantise import largest_of
from autopar.ir.ops.scalings import Format, Scaling

INPUT, WEIGHT, GRADIENT = range(3)
_RUNNING, _LARGEST, _STEPS = range(3)


def shape_of_history(scaling: Scaling) -> tuple[int, int]:
    """Of a product by a recipe with a history."""
    return 3, _STEPS + scaling.steps


def known_largest(history: Tensor, row: int, form: Format) -> Tensor:
    """(): the magnitude that a scale of this step is computed of."""
    largest = history[row, _LARGEST]
    return torch.where(largest > 0, largest, form.limit)


@torch.no_grad()
def note_largest(history: Tensor, row: int, matrix: Tensor) -> None:
    """Have seen ``matrix`` in this step."""
    # ``data``: a recomputation is given what forward was given, and torch would take a write to that for a mistake.
    running = history.data[row, _RUNNING]
    running.copy_(torch.maximum(running, largest_of(matrix, by_row=False)))


def running_of(history: Tensor) -> Tensor:
    """(3,): the largest magnitudes that this rank has seen in this step."""
    return history[:, _RUNNING]


@torch.no_grad()
def roll(history: Tensor, largest: Tensor) -> None:
    """End the step. largest: (3,), over all ranks; what is not finite there is left out, as the step itself is."""
    steps = history[:, _STEPS:]
    latest = torch.where(torch.isfinite(largest), largest, steps[:, 0])
    steps.copy_(torch.cat([latest[:, None], steps[:, :-1]], dim=1))
    history[:, _LARGEST] = steps.amax(dim=1)
    history[:, _RUNNING] = 0.0
