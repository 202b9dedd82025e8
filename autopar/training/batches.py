"""Where the batches of ``autopar train`` come from: a corpus, the model file's own batches, or its example inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.data.inputs import TokenInputs
from autopar.data.sequences import Sequences
from autopar.ir.errors import InvalidInput
from autopar.runtime.inputs import own_rows
from autopar.runtime.module import ParallelModule
from autopar.training.job import OpenedJob


class Batches(Protocol):
    """Batches by the number of steps before them, the same whatever the plan."""

    def whole(self, step: int) -> Any:
        """The global batch."""

    def own(self, step: int, pm: ParallelModule) -> Any:
        """The rows of this data-parallel rank."""

    def state(self, steps: int) -> dict[str, Any]:
        """Where the data stands after so many steps, for a checkpoint."""


def open_batches(opened: OpenedJob, model: nn.Module, saved: dict[str, Any] | None = None, step: int = 0) -> Batches:
    """The batches of a job. saved: what ``state`` said when ``step`` steps were done. Raises InvalidInput."""
    size, seed = opened.plan.batch.global_size, opened.job.seed if saved is None else saved["seed"]
    if saved is not None and (saved.get("corpus") is None) != (opened.corpus is None):
        had = "had" if opened.corpus is None else "had no"
        raise InvalidInput(f"the run that is resumed {had} --data.\n  expected: the same data; it goes on in it")
    if opened.corpus is None:
        return GeneratedBatches(lambda: _generated(opened, size, seed), seed)
    example = opened.source.meta_inputs(size, opened.seq_len)
    inputs = TokenInputs.of(example, model, opened.source.from_tokens, opened.seq_len)
    sequences = Sequences(opened.corpus, inputs.seq_len, seed)
    digest = f"{opened.corpus.digest} / {inputs.seq_len}"
    if saved is not None and saved["corpus"] != digest:
        raise InvalidInput(
            f"the run that is resumed had other data than --data {opened.corpus}, in sequences of {inputs.seq_len}.\n"
            "  expected: the same files and --seq, since it goes on where it stood in them"
        )
    first = 0 if saved is None else saved["samples"] - step * size
    return TokenBatches(sequences, inputs, size, first=first, digest=digest)


class TokenBatches:
    """Sequences of a corpus. Each rank reads its own rows, and its own only."""

    def __init__(self, sequences: Sequences, inputs: TokenInputs, batch_size: int, *, first: int, digest: str) -> None:
        """first: the sample that step 0 would begin with, so that the steps to come begin where the data stands."""
        self.sequences, self.inputs, self.batch_size = sequences, inputs, batch_size
        self._first, self._digest = first, digest
        self._vocabulary: int | None = None

    def whole(self, step: int) -> Any:
        """The global batch of a step. Raises InvalidInput for a step before the corpus was first read."""
        first = self._first + step * self.batch_size
        if first < 0:
            raise InvalidInput(
                "--compare-single: the steps before the checkpoint had smaller batches than this plan.\n"
                "  try: a plan for the batch that they had"
            )
        return self.inputs.fill(self.sequences.windows(first, self.batch_size))

    def own(self, step: int, pm: ParallelModule) -> Any:
        """The rows of this data-parallel rank. Raises InvalidInput for tokens outside the vocabulary."""
        first, rows = own_rows(self.batch_size, pm.data_parallel_rank, pm.data_parallel_size)
        windows = self.sequences.windows(self._first + step * self.batch_size + first, rows)
        self._check(windows, pm)
        return self.inputs.fill(windows)

    def state(self, steps: int) -> dict[str, Any]:
        """Seed, position in samples after ``steps`` steps, and digest of the corpus, for a checkpoint."""
        samples = self._first + steps * self.batch_size
        return {"seed": self.sequences.seed, "samples": samples, "corpus": self._digest}

    def _check(self, windows: Tensor, pm: ParallelModule) -> None:
        """Raise InvalidInput for token ids that the model has no embedding of, which would end a GPU's process."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(pm, self.inputs.tokens)
        low, high = (int(value) for value in torch.aminmax(windows))
        if low < 0 or high >= self._vocabulary:
            raise InvalidInput(
                f"{self.sequences.corpus.where}: has the token {low if low < 0 else high}.\n"
                f"  expected: 0 to {self._vocabulary - 1}, the rows of the model's embedding\n"
                "  try: tokens of the model's own tokenizer; --token-dtype, if they are raw integers"
            )


class GeneratedBatches:
    """Global batches one after the other, of which each rank takes its rows."""

    def __init__(self, start: Callable[[], Iterator[Any]], seed: int) -> None:
        self._start, self._seed = start, seed
        self._stream, self._taken = start(), 0
        self._last: Any = None

    def whole(self, step: int) -> Any:
        """The global batch of a step; the stream is started anew for a step before the last."""
        if step < self._taken - 1:
            self._stream, self._taken = self._start(), 0
        while self._taken <= step:
            self._last, self._taken = next(self._stream), self._taken + 1
        return self._last

    def own(self, step: int, pm: ParallelModule) -> Any:
        """The rows of this data-parallel rank."""
        return pm.shard_batch(self.whole(step))

    def state(self, steps: int) -> dict[str, Any]:
        """The seed, for a checkpoint."""
        return {"seed": self._seed}


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a call."""
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def vocabulary_of(pm: ParallelModule, tokens: str | None) -> int:
    """Rows of the smallest table that the input called ``tokens`` is looked up in; no limit if there is none."""
    signature, smallest = pm.engine.signature, 1 << 62
    keys = {f"kwargs[{tokens!r}]"}
    for node in pm.engine.captured.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.embedding.default:
            continue
        table, ids = node.args[:2]
        given = signature.inputs.get(ids.name)
        if given is not None and given.key in keys:
            smallest = min(smallest, table.meta["val"].shape[0])
    return smallest


def _generated(opened: OpenedJob, batch_size: int, seed: int) -> Iterator[Any]:
    """The example inputs over and over for a model without data, and after the data that it has."""
    if opened.source.batches is not None:
        yield from opened.source.batches(batch_size, opened.seq_len, seed)
    while True:
        yield opened.source.inputs(batch_size, opened.seq_len)
