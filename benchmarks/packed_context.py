"""Packed documents on ranks that share a sequence: errors under each plan, work of each rank, and memory by length.

    python benchmarks/packed_context.py [--only errors,work,memory] [--plans "cp2 ring"]

errors: the largest relative error of the loss, and of any gradient, in float32 against the documents one by one in one
process, for each plan; batches have rows of 16, of 20 and of 15 positions. Exits with 1 if one is above 1e-4.

work: pairs of a query and a key that a causal attention within documents computes on the busiest rank, over the mean.
Lengths are log-normal, as those of ``benchmarks.packed_gpu``; for each number of ranks the mean and the largest of 32
rows, in natural order, in zigzag layout, and in the order of the documents.

memory: the most elements of any tensor that a ring of two ranks makes, forward and backward, by length of the row.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.ir.ops.documents import runs_of
from autopar.ir.packed_order import order_of, piece, work_of
from autopar.ir.sequence import Span, spans, stored
from tests.end_to_end.test_packed import ATTENTION, PACKED, PLANS, planned, train
from tests.harness import run_ranks
from tests.ir.test_packed_order import documents_of, log_normal
from tests.ir.test_ring_documents import both

LIMIT = 1e-4
ROWS = 32
Lengths = tuple[float, float]
# Median and sigma of the logarithm.
TEXT: dict[str, Lengths] = {"short": (400.0, 1.0), "mixed": (665.0, 1.5), "long": (1808.0, 1.8)}


def errors(part: str) -> bool:
    """Print the table of errors of plans whose names have a part. Returns whether all are small."""
    print(f"{'model and plan':<34} {'loss':>8} {'gradients':>10}  order of documents")
    fine = True
    for name, case, ranks, constraints, attention in (
        *((name, *plan, None) for name, plan in PLANS.items()),
        *((name, *plan) for name, plan in ATTENTION.items()),
    ):
        if part not in name:
            continue
        plan = planned(case, ranks, constraints, attention)
        found = run_ranks(train, ranks, case, constraints, plan, idle_s=900.0, limit_s=3600.0)
        steps = 2 * len(PACKED)
        loss = max(max(own[0][:steps:2]) for own in found)
        gradients = max(max(own[0][1:steps:2]) for own in found)
        print(f"{name:<34} {loss:8.1e} {gradients:10.1e}  {'yes' if found[0][2] else 'no'}", flush=True)
        fine &= max(loss, gradients) <= LIMIT
    return fine


def busiest(order: tuple[Span, ...], lengths: list[int], num_ranks: int) -> float:
    """Work of the busiest rank over the mean."""
    length = sum(lengths)
    (runs,) = runs_of(documents_of([lengths]))
    owner = sorted((span, rank) for rank in range(num_ranks) for span in piece(order, stored(length, rank, num_ranks)))
    load = [0] * num_ranks
    for (_, rank), pairs in zip(owner, work_of(runs, tuple(span for span, _ in owner)), strict=True):
        load[rank] += pairs
    return max(load) / mean(load)


def work() -> None:
    """Print the table of work."""
    print(f"{'lengths':<8} {'row':>7} {'ranks':>6} {'natural':>14} {'zigzag':>14} {'documents':>14}   mean and largest")
    for text, (median, sigma) in TEXT.items():
        for length in (8192, 65536):
            rows = [log_normal(length, seed, median, sigma) for seed in range(ROWS)]
            runs = [runs_of(documents_of([lengths]))[0] for lengths in rows]
            for num_ranks in (2, 4, 8):
                kinds = [
                    [busiest(spans(length, 1), lengths, num_ranks) for lengths in rows],
                    [busiest(spans(length, num_ranks), lengths, num_ranks) for lengths in rows],
                    [
                        busiest(order_of(own, length, num_ranks), lengths, num_ranks)
                        for own, lengths in zip(runs, rows, strict=True)
                    ],
                ]
                shown = " ".join(f"{mean(kind):8.2f} {max(kind):5.2f}" for kind in kinds)
                print(f"{text:<8} {length:7} {num_ranks:6} {shown}", flush=True)


def memory() -> None:
    """Print the table of memory."""
    lengths = (2048, 4096, 8192, 16384)
    print(f"{'row':>7} {'largest tensor':>15} {'of a position':>14} {'pairs given to kernels':>23} {'of all':>7}")
    (found, _) = run_ranks(both, 2, lengths)
    for length, (numel, pairs) in zip(lengths, found, strict=True):
        print(f"{length:7} {numel:15} {numel / length:14.1f} {pairs:23} {2 * pairs / length**2:7.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="work,memory,errors")
    parser.add_argument("--plans", default="", help="part of the names of models and plans that are run")
    options = parser.parse_args()
    wanted = options.only.split(",")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "work" in wanted:
        work()
    if "memory" in wanted:
        memory()
    return 0 if "errors" not in wanted or errors(options.plans) else 1


if __name__ == "__main__":
    sys.exit(main())
