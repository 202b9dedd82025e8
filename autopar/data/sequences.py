"""Sequences of a corpus, epoch after epoch, each epoch in an order of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autopar.data.corpus import Corpus
from autopar.data.order import permuted
from autopar.ir.errors import InvalidInput


@dataclass(frozen=True)
class Sequences:
    """``corpus`` cut into sequences of ``seq_len`` tokens; those at its end that do not fill one are left out.

    The samples of a run are numbered on from epoch to epoch. Which sequence a sample is depends on its number and the
    seed alone, so a run goes on wherever it stopped, and each rank reads what is its own.
    """

    corpus: Corpus
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if not len(self):
            raise InvalidInput(
                f"--data {self.corpus}; one sequence and the token after it take {self.seq_len + 1:,}.\n"
                "  try: more data, or a plan for a shorter --seq"
            )

    def __len__(self) -> int:
        """Of one epoch."""
        return (len(self.corpus) - 1) // self.seq_len

    def windows(self, first: int, count: int) -> Tensor:
        """Samples ``first`` to ``first + count``: (count, seq_len + 1) int64, each with the token that follows it."""
        samples = np.arange(first, first + count)
        sequences = np.empty(count, np.int64)
        for epoch in range(first // len(self), (first + count - 1) // len(self) + 1):
            own = samples // len(self) == epoch
            sequences[own] = permuted(samples[own] % len(self), len(self), self._key(epoch))
        rows = [self.corpus.read(int(number) * self.seq_len, self.seq_len + 1) for number in sequences]
        return torch.from_numpy(np.stack(rows))

    def _key(self, epoch: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()[:8], "little")
