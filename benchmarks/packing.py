"""Packed rows beside padded ones: seconds for the same documents, on 4 data-parallel ranks.

    python benchmarks/packing.py [--documents 256]

The documents are functions and classes of the standard library's source, in bytes, cut at 1,024. Padded: batches of
8, each rank's padded to its longest, as a collator with dynamic padding makes them. Packed: ``dataloader(pack=True)``.
Both run under one plan, in one process group, in turn; the first batches, in which programs are made, are not timed.
Printed: tokens of documents a second, tokens that were computed for each of them, and the work of the rank that has
most in that of the mean.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from autopar.ir.analysis.token_work import token_work
from tests.harness import run_ranks

RANKS, ROWS, LONGEST = 4, 8, 1024
UNTIMED = 2


def documents(count: int) -> list[torch.Tensor]:
    """Functions and classes, as bytes."""
    found: list[torch.Tensor] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="ignore")
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = (ast.get_source_segment(source, node) or "").encode()[:LONGEST]
                if len(text) > 16:
                    found.append(torch.tensor(list(text)))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[number] for number in order[:count]]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows to the longest of them, each with one document."""
    shape = len(rows), max(map(len, rows))
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = labels[place, : len(row)] = row
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(shape[1]).expand(shape).contiguous()}


def compare(count: int) -> dict[str, tuple[float, float, float]]:
    """By kind of batch: document tokens a second, computed tokens for each, work of the busiest rank ÷ mean."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LONGEST, use_cache=False,
    )  # fmt: skip
    data = documents(count)
    given = {
        "input_ids": torch.zeros(ROWS, LONGEST, dtype=torch.int64),
        "labels": torch.zeros(ROWS, LONGEST, dtype=torch.int64),
        "position_ids": torch.arange(LONGEST).repeat(ROWS, 1),
    }
    pm = autopar.parallelize(LlamaForCausalLM(config), RANKS, example_inputs=given, dp=RANKS, num_microbatches=1)
    work = token_work(pm.engine.captured)
    loaders: dict[str, Any] = {
        "padded": pm.dataloader(data, shuffle=False, collate_fn=padded),
        "packed": pm.dataloader(data, shuffle=False, pack=True, max_tokens=LONGEST),
    }
    found = {}
    for kind, loader in loaders.items():
        seconds, tokens, computed, uneven = 0.0, 0, 0, list[float]()
        for number, batch in enumerate(loader):
            start = time.perf_counter()
            pm.step(**batch)
            dist.barrier()
            if number < UNTIMED:
                continue
            seconds += time.perf_counter() - start
            lengths = _lengths(batch)
            told: list[Any] = [None] * RANKS
            dist.all_gather_object(told, (sum(lengths), batch["input_ids"].numel(), sum(map(work.of, lengths))))
            tokens, computed = tokens + sum(own[0] for own in told), computed + sum(own[1] for own in told)
            uneven.append(max(own[2] for own in told) / mean(own[2] for own in told))
            pm.zero_grad()
        found[kind] = tokens / seconds, computed / tokens, mean(uneven)
    return found


def _lengths(batch: dict[str, torch.Tensor]) -> list[int]:
    """Of the documents in a batch."""
    found = []
    for labels, positions in zip(batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            length = int((labels[start:end] != -100).sum())
            found.append(length + (labels[start] == -100).item() if length else 0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=512)
    (found, *_) = run_ranks(compare, RANKS, parser.parse_args().documents, limit_s=3600.0)
    print("batches    document tokens/s    computed for each    busiest rank ÷ mean")
    for kind, (rate, computed, uneven) in found.items():
        print(f"{kind:<10} {rate:17,.0f} {computed:20.2f} {uneven:22.2f}")
    print(f"packed ÷ padded: {found['packed'][0] / found['padded'][0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
