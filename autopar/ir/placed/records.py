"""The communication of one training step as records: who sends what along which axis, how much, how often.

A record says what runs. Prices, checks and drawings of communication read these; a test counts the collectives of
real steps against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PIPELINE_AXIS = "pp"

Cause = Literal["redistribution", "op", "gradient", "parameter", "buffer", "stage", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One collective, or one send, of a training step of the ranks of one stage.

    cause: a redistribution between ops; inside a lowered op; the sum of a gradient over ranks; a parameter that ZeRO
    gathers; a buffer whose new value other stages get; a tensor that crosses to another stage; the loss.
    of: name of the op, parameter, buffer or tensor.
    kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or ``send``.
    axes: of the mesh, along which the ranks differ that take part, ``pp`` among them where stages do.
    payload_bytes: of one rank, of the tensor before a scatter or after a gather. times: in a step.
    stages: that take part, one within a stage. dispatch: of tokens to experts, which decide the size;
    ``payload_bytes`` is the mean over ranks.
    """

    cause: Cause
    of: str
    kind: str
    phase: Literal["forward", "backward"]
    axes: tuple[str, ...]
    payload_bytes: float
    times: int
    stages: tuple[int, ...]
    dispatch: bool = False
