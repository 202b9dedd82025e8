"""Documents packed into rows train as documents run one by one do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.ir.ops import composite
from benchmarks.models import CASES
from tests.harness import run_ranks
from tests.parity import relative

# Lengths of the documents in each row of 16 positions; the second batch has others.
PACKED = (
    ((5, 7, 4), (16,), (1, 15), (8, 8)),
    ((2, 3, 11), (6, 10), (13, 1, 1, 1), (9, 7)),
)


def packed_batch(lengths: tuple[tuple[int, ...], ...], seed: int) -> dict[str, Tensor]:
    """Rows as transformers' collators make them: positions that restart, and no label for a document's first token."""
    tokens = torch.randint(0, 64, (len(lengths), sum(lengths[0])), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


def one_by_one(model: torch.nn.Module, given: dict[str, Tensor], lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """The mean loss of all tokens that have a label, of each document by itself; leaves gradients."""
    count = (given["labels"] != -100).sum()
    total = torch.zeros(())
    for row, own in enumerate(lengths):
        start = 0
        for length in own:
            part = slice(start, start + length)
            start += length
            if length > 1:
                inputs = {name: given[name][row : row + 1, part] for name in ("input_ids", "labels")}
                loss = model(**inputs).loss * (length - 1) / count
                loss.backward()
                total += loss.detach()
    return total


def train(case: str, constraints: dict[str, Any]) -> tuple[list[float], bool]:
    """Errors of each step's loss and gradients; whether every attention knows of documents, and has no mask."""
    torch.manual_seed(0)
    model = CASES[case].build()
    alone = copy.deepcopy(model)
    given = packed_batch(PACKED[0], 0)
    parallel = autopar.parallelize(model, dist.get_world_size(), example_inputs=given, **constraints)
    errors = []
    for step, lengths in enumerate(PACKED):
        given = packed_batch(lengths, step)
        alone.zero_grad()
        parallel.zero_grad()
        loss = one_by_one(alone, given, lengths)
        got = parallel.step(**parallel.shard_batch(given))
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        errors += [abs(got.item() / loss.item() - 1), relative(parallel.full_gradients(), expected)]
    attentions = [n for n in parallel.engine.captured.graph.nodes if n.target is composite.attention]
    return errors, all(len(n.args) == 6 and n.args[3] is None for n in attentions)


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama zero3": ("llama", 2, {"dp": 2, "zero": 3}),
    "llama dp2 tp2": ("llama", 4, {"dp": 2, "tp": 2}),
    "llama pp2": ("llama", 2, {"pp": 2, "num_microbatches": 2}),
    "llama cp2": ("llama", 2, {"cp": 2}),
    "llama cp2 tp2": ("llama", 4, {"cp": 2, "tp": 2}),
    "qwen3_moe dp2 cp2": ("qwen3_moe", 4, {"dp": 2, "cp": 2}),
    "mistral tp2 sp": ("mistral", 2, {"tp": 2, "sp": True}),
    "gemma2 dp2": ("gemma2", 2, {"dp": 2}),
}
FAST = ("llama cp2",)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PLANS])
def test_packed_documents_are_exact(name: str) -> None:
    case, ranks, constraints = PLANS[name]
    for errors, is_packed in run_ranks(train, ranks, case, constraints):
        assert max(errors) < 1e-4, errors
        assert is_packed
