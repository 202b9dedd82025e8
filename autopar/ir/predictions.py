"""What a plan says of its step: the prediction of the cost model, as the plan file has it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from autopar.ir.goodput import GoodputPrediction

# What a plan does not know is an error.
strict = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Model(BaseModel):
    model_config = strict


class LengthsPrediction(_Model):
    """Steps on documents as long as those of a dataset.

    packed: into rows of ``max_tokens``, one after another; else one a row, padded to the longest of a rank's.
    num_batches: of drawn documents, whose steps these are. step_time_s: their mean; fast_step_time_s,
    slow_step_time_s: what a tenth, and nine tenths, of them take at most. even_step_time_s: if all microbatches of all
    ranks were the mean of them, so the rest is what ranks wait as their documents differ. document_tokens: of a step,
    without padding; computed_tokens: with it. document_tokens_per_s_per_gpu: of documents.
    """

    packed: bool
    max_tokens: PositiveInt
    num_batches: PositiveInt
    step_time_s: float
    fast_step_time_s: float
    slow_step_time_s: float
    even_step_time_s: float
    document_tokens: float
    computed_tokens: float
    document_tokens_per_s_per_gpu: float


class Prediction(_Model):
    """The prediction of the cost model for the plan. Seconds and bytes; memory of the fullest rank, and the probability
    that it fits.

    stage_forward_s, stage_backward_s: of every stage; stage_inputs_s, stage_weights_s: of the parts of its backward, if
    the schedule splits it. stage_memory_bytes, memory_parts_bytes: of a rank of each place
    in the pipeline, which holds one stage or several; stage_host_bytes: the most activations that it has in host
    memory, if there are any. All of a step whose rows are whole documents; of packed ones if
    the search was given ``lengths``, which is then the prediction over batches of them. goodput: what is left of it
    over days with failures, and the intervals and spares that leave most. offloaded_bytes: in host memory and on disk,
    of the rank with most there.
    """

    step_time_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    peak_memory_bytes: int
    fit_probability: float | None = None
    stage_memory_bytes: list[int] = []
    stage_forward_s: list[float] = []
    stage_backward_s: list[float] = []
    stage_inputs_s: list[float] = []
    stage_weights_s: list[float] = []
    memory_parts_bytes: list[dict[str, int]] = []
    stage_host_bytes: list[int] | None = None
    breakdown_s: dict[str, float] = {}
    offloaded_bytes: dict[Literal["host", "disk"], int] | None = None
    lengths: LengthsPrediction | None = None
    goodput: GoodputPrediction | None = None
