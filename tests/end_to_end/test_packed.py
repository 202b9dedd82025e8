"""Documents packed into rows train as documents run one by one do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.ir.ops import composite
from autopar.ir.packed_order import to_document_order
from autopar.ir.plan import Plan
from benchmarks.models import CASES
from tests.harness import run_ranks
from tests.parity import relative, with_attention

# Lengths of the documents in each row of a batch: of 16 positions, of 20, and of 15, which no two ranks can share.
PACKED = (
    ((5, 7, 4), (16,), (1, 15), (8, 8)),
    ((2, 3, 11), (6, 10), (13, 1, 1, 1), (9, 7)),
    ((2, 18), (6, 10, 4), (13, 1, 1, 5), (9, 11)),
    ((15,), (3, 3, 9), (8, 7), (1, 14)),
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


def planned(case: str, ranks: int, constraints: dict[str, Any], attention: str | None) -> Plan | None:
    """The plan of the search, with the factor of every attention on axis cp; None where that is to be searched."""
    if attention is None:
        return None
    model = CASES[case].build()
    given = packed_batch(PACKED[0], 0)
    found = autopar.search(model, ranks, example_inputs=given, **constraints)
    return with_attention(found, {"cp": attention}, constraints.get("sequence_layout", "zigzag"))


def train(
    case: str, constraints: dict[str, Any], plan: Plan | None = None, steps: int = len(PACKED)
) -> tuple[list[float], bool, bool]:
    """Errors of each step's loss and gradients, and of logits; whether every attention knows of documents, and has no
    mask; whether rows are in the order of their documents."""
    torch.manual_seed(0)
    model = CASES[case].build()
    alone = copy.deepcopy(model)
    given = packed_batch(PACKED[0], 0)
    how = constraints if plan is None else {"plan": plan}
    parallel = autopar.parallelize(model, dist.get_world_size(), example_inputs=given, **how)
    errors = []
    for step, lengths in enumerate(PACKED[:steps]):
        given = packed_batch(lengths, step)
        alone.zero_grad()
        parallel.zero_grad()
        loss = one_by_one(alone, given, lengths)
        got = parallel.step(**parallel.shard_batch(given))
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        errors += [abs(got.item() / loss.item() - 1), relative(parallel.full_gradients(), expected)]
    if "pp" not in constraints:
        given = packed_batch(PACKED[0], 0)
        own = parallel.shard_batch(given)
        with torch.no_grad():
            errors.append(float((parallel(**own)["logits"] - alone(**own).logits).abs().max()))
    attentions = [n for n in parallel.engine.captured.graph.nodes if n.target is composite.attention]
    called = {n.target for own in parallel.engine.local for block in own.program.blocks for n in block.graph.nodes}
    by_documents = to_document_order in called
    return errors, all(len(n.args) == 6 and n.args[3] is None for n in attentions), by_documents


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{
        f"{case} {name}": (case, 2, constraints)
        for case in ("llama", "gpt2")
        for name, constraints in (
            ("dp2", {"dp": 2}),
            ("zero3", {"dp": 2, "zero": 3}),
            ("tp2 sp", {"tp": 2, "sp": True}),
            ("pp2", {"pp": 2, "num_microbatches": 2}),
        )
    },
    "llama dp2 tp2": ("llama", 4, {"dp": 2, "tp": 2}),
    "llama cp2 tp2": ("llama", 4, {"cp": 2, "tp": 2}),
    "qwen3_moe dp2 cp2": ("qwen3_moe", 4, {"dp": 2, "cp": 2}),
    "mistral tp2 sp": ("mistral", 2, {"tp": 2, "sp": True}),
    "mistral cp2": ("mistral", 2, {"cp": 2}),
    "gemma2 dp2": ("gemma2", 2, {"dp": 2}),
}
ATTENTION: dict[str, tuple[str, int, dict[str, Any], str]] = {
    f"{case} {name}": (case, ranks, {**constraints, "sequence_layout": layout}, choice)
    for case in ("llama", "gpt2")
    for layout in ("contiguous", "zigzag")
    for name, ranks, constraints, choice in (
        (f"cp2 ring {layout}", 2, {"cp": 2}, "s&t"),
        (f"cp2 gathered {layout}", 2, {"cp": 2}, "s"),
        (f"cp2 ulysses {layout}", 2, {"cp": 2}, "h"),
        (f"pp2 cp2 ring {layout}", 4, {"pp": 2, "cp": 2, "num_microbatches": 2}, "s&t"),
    )
}
FAST = ("llama cp2 ring zigzag",)


def _marked(names: Iterable[str]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _marked(PLANS))
def test_packed_documents_are_exact(name: str) -> None:
    case, ranks, constraints = PLANS[name]
    for errors, is_packed, _ in run_ranks(train, ranks, case, constraints):
        assert max(errors) < 1e-4, errors
        assert is_packed


@pytest.mark.parametrize("name", _marked(ATTENTION))
def test_packed_documents_are_exact_however_ranks_share_them(name: str) -> None:
    case, ranks, constraints, attention = ATTENTION[name]
    plan, steps = planned(case, ranks, constraints, attention), 2 if name in FAST else len(PACKED)
    for errors, is_packed, by_documents in run_ranks(train, ranks, case, constraints, plan, steps):
        assert max(errors) < 1e-4, errors
        assert is_packed
        assert by_documents == (name.endswith("zigzag") and attention != "h")
