"""A mixture of experts as a model file, for ``benchmarks/faults.py``: Mixtral in small, on random tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import VOCAB, mixtral, random_tokens


def model() -> nn.Module:
    return mixtral()


def example_inputs(batch_size: int = 8, seq_len: int = 16) -> dict[str, Tensor]:
    tokens = torch.zeros((batch_size, seq_len), dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


def batches(batch_size: int = 8, seq_len: int = 16, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    for step in count(seed):
        tokens = random_tokens(step, rows=batch_size, columns=seq_len, vocab=VOCAB)
        yield {"input_ids": tokens, "labels": tokens.clone()}
