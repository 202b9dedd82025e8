"""The held-out loss of ``autopar train``: the same batches each time, in eval mode."""

from __future__ import annotations

import torch

from autopar.data.inputs import TokenInputs
from autopar.data.sequences import Sequences
from autopar.ir.errors import InvalidInput
from autopar.runtime.module import ParallelModule
from autopar.training.batches import TokenBatches, arguments_of
from autopar.training.job import OpenedJob


class HeldOut:
    """The first batches of a corpus that is not trained on; at most one pass over it."""

    def __init__(self, opened: OpenedJob, model: torch.nn.Module) -> None:
        """Raises InvalidInput if the corpus does not fill one global batch."""
        assert opened.held_out is not None, "an evaluation was asked for"
        size = opened.plan.batch.global_size
        example = opened.source.meta_inputs(size, opened.seq_len)
        inputs = TokenInputs.of(example, model, opened.source.from_tokens, opened.seq_len)
        sequences = Sequences(opened.held_out, inputs.seq_len, seed=0)
        self.num_batches = min(opened.job.eval_batches, len(sequences) // size)
        if not self.num_batches:
            raise InvalidInput(
                f"--eval-data {opened.held_out}: holds {len(sequences)} sequences of {inputs.seq_len} tokens.\n"
                f"  expected: at least the {size} of a global batch\n  try: more data"
            )
        self._batches = TokenBatches(sequences, inputs, size, first=0, digest="")

    def loss(self, parallel: ParallelModule) -> float:
        """Mean loss of the batches. All ranks call together; the module is in its mode again afterwards."""
        training = parallel.training
        parallel.eval()
        try:
            losses = []
            for number in range(self.num_batches):
                args, kwargs = arguments_of(self._batches.own(number, parallel))
                losses.append(parallel.loss(*args, **kwargs))
            return float(torch.stack(losses).mean())
        finally:
            parallel.train(training)

    def check(self, parallel: ParallelModule) -> None:
        """Raise InvalidInput if the tokens of a batch are not the model's. This rank's rows alone."""
        for number in range(self.num_batches):
            self._batches.own(number, parallel)
