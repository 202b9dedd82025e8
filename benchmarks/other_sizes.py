"""Steps of random batches and lengths under one plan, against one process, in float32.

    python benchmarks/other_sizes.py [--models llama,t5] [--plans zero3,pp2] [--steps 20]

The plan is made for 8 rows; of the steps after it one has one row, one five, the others from 1 to 17, and each a length
of its own, even or odd. Prints the table model × plan: the largest relative error of the loss and of any gradient over
all steps; that of another process with its rows in reverse, as what one step rounds otherwise changes the parameters of
the next; how many programs the job made, the plan's own among them; seconds of the first step of another size, in which
they are made, and of the median step after it, each of which has sizes that were not there before. ``refused``, with
the reason, where the plan or what it cannot run is refused. A ring is in zigzag order where the model can be, else in
natural order; a model whose scores are spelt out, as soft caps need, runs the plan with context parallelism that the
search finds. Exits with 1 if an error is above 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from benchmarks.models import CASES
from tests.harness import RankFailure, run_ranks
from tests.parity import relative, with_attention

MODELS = "llama,gpt2,bert,t5,mixtral,deepseek_v3,gemma2,mistral,gpt_neox,bart,opt,phi3,vit_40"
# Ranks, constraints, and the factor of every attention on axis cp where that is not left to the search.
PLANS: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "dp2": (2, {"dp": 2}, None),
    "zero3": (2, {"dp": 2, "zero": 3}, None),
    "tp2 sp": (2, {"tp": 2, "sp": True}, None),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}, None),
    "cp2 ring": (2, {"cp": 2}, "s&t"),
    "cp2 ulysses": (2, {"cp": 2, "sequence_layout": "contiguous"}, "h"),
    "dp4": (4, {"dp": 4, "num_microbatches": 1}, None),
    "dp2 tp2 pp2": (8, {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2}, None),
}
LIMIT = 1e-4
LONGEST = 31


def batch_of(case: str, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of a model, of that batch and, where they are of integers, length; a few labels are left out."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in CASES[case].batch(0).items():
        shape = [rows, *tensor.shape[1:]]
        if tensor.is_floating_point():
            found[name] = torch.randn(shape, generator=generator)
            continue
        if tensor.dim() > 1:
            shape[1] = length
        high = min(64, int(tensor.max()) + 1)
        found[name] = torch.randint(min(3, high - 1), high, shape, generator=generator)
        if name == "attention_mask":
            found[name] = torch.ones_like(found[name])
    if found["labels"].dim() > 1:
        found["labels"][:, -2:] = -100
    return found


def train(case: str, plan: str, steps: int) -> tuple[float, float, int, float, float] | str:
    """The largest error, that of one process, the number of programs, and seconds of the first step of other sizes and
    of a later one."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = CASES[case].build()
    alone = copy.deepcopy(model)
    given = batch_of(case, 8, 16, 0)
    try:
        ranks, how, attention = PLANS[plan]
        if attention is not None:
            found = autopar.search(model, ranks, example_inputs=given, **how)
            fused = any(key.endswith("attention") for block in found.blocks for key in block.ops)
            how = {"plan": with_attention(found, {"cp": attention}) if fused else found}
        parallel = autopar.parallelize(model, ranks, example_inputs=given, **how)
    except autopar.AutoparError as error:
        return str(error).splitlines()[0]
    reverse = copy.deepcopy(alone)
    # Momentum makes ten times as much of it in the end.
    learning_rate = 0.1 * CASES[case].learning_rate
    optimizers = [
        torch.optim.SGD(own.parameters(), lr=learning_rate, momentum=0.9) for own in (alone, reverse, parallel)
    ]
    draws = random.Random(case)
    errors, rounding, seconds = [], [], []
    for step in range(steps):
        rows = {1: 1, 2: 5}.get(step, draws.randint(1, 17))
        given = batch_of(case, rows, draws.randint(4, LONGEST), step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = differentiated(alone, given)
        start = time.perf_counter()
        try:
            loss = parallel.step(**parallel.shard_batch(given)).item()
        except autopar.AutoparError as error:
            return f"{rows} rows: {str(error).splitlines()[0]}"
        seconds.append(time.perf_counter() - start)
        errors.append(difference((loss, parallel.full_gradients()), expected))
        reversed_rows = {name: tensor.flip(0) for name, tensor in given.items()}
        rounding.append(difference(differentiated(reverse, reversed_rows), expected))
        for optimizer in optimizers:
            optimizer.step()
    return max(errors), max(rounding), parallel.engine.variants.count, seconds[0], median(seconds[1:])


def differentiated(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process."""
    loss = model(**given).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> float:
    """The larger relative error, of the loss or of a gradient."""
    return max(abs(found[0] / expected[0] - 1), relative(found[1], expected[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(f"{'model':<12} {'plan':<12} {'error':>8} {'rounding':>9} {'programs':>9} {'first s':>8} {'step s':>7}")
    wrong = 0
    for case in options.models.split(","):
        for plan in options.plans.split(","):
            try:
                found = run_ranks(train, PLANS[plan][0], case, plan, options.steps)
            except RankFailure as failure:
                print(f"{case:<12} {plan:<12} failed: {str(failure).strip().splitlines()[-1]}", flush=True)
                wrong += 1
                continue
            if isinstance(found[0], str):
                print(f"{case:<12} {plan:<12} refused: {found[0]}", flush=True)
                continue
            error = max(own[0] for own in found)
            _, rounding, programs, first, later = found[0]
            print(
                f"{case:<12} {plan:<12} {error:8.1e} {rounding:9.1e} {programs:9} {first:8.1f} {later:7.3f}", flush=True
            )
            wrong += not error <= LIMIT
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
