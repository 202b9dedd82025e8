"""Steps of a pipeline whose schedule splits the backward, beside those of 1F1B, with and without rematerialisation.

    python benchmarks/split_backward.py [--ranks 2] [--microbatches 4] [--remat full,none] [--rounds 9] [--compiled]

A Llama of 40M parameters in float32 on gloo, a core for each rank. The schedules take turns in one group of processes,
each at the stage cuts and the level of rematerialisation of all blocks that are in the row. The table has the median of
the ratios of each round to 1F1B's step, beside it the ratio that the cost model predicts for this machine's processor,
and the bubble of 1F1B that a schedule could win back: the share of a step in which a rank has nothing to do.
compiled: every schedule runs compiled too, in the same rounds; ratios are to 1F1B that is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from autopar.ir.plan import Plan

SEQ, VOCABULARY = 256, 4096
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}

COMPILED = " compiled"

Step = Callable[[], float]


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def inputs(rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, SEQ), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens}


def plan_of(ranks: int, microbatches: int, schedule: str, remat: str) -> Plan:
    """One row a microbatch."""
    return autopar.search(
        build(),
        ranks,
        example_inputs=inputs(microbatches),
        pp=ranks,
        num_microbatches=microbatches,
        schedule=schedule,
        virtual_stages=SCHEDULES[schedule],
        remat=remat,
    )


def step_of(plan: Plan, rows: int, compiled: bool) -> Step:
    batch = inputs(rows)
    parallel = autopar.parallelize(build(), plan.num_ranks, example_inputs=batch, plan=plan, compile=compiled)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    mine = parallel.shard_batch(batch)

    def step() -> float:
        optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = float(parallel.step(**mine))
        seconds = time.perf_counter() - start
        optimizer.step()
        losses.setdefault(id(step), []).append(loss)
        return seconds

    return step


losses: dict[int, list[float]] = {}


def bubble_of(plan: Plan) -> float:
    """The share of a predicted step of 1F1B in which the busiest rank waits for others."""
    assert plan.prediction is not None
    each = zip(plan.prediction.stage_forward_s, plan.prediction.stage_backward_s, strict=True)
    busy = plan.batch.num_microbatches * max(map(sum, each))
    return 1.0 - busy / plan.prediction.step_time_s


def work(rank: int, ranks: int, plans: dict[str, str], microbatches: int, rounds: int, title: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a rank has no use for a pool of compiler processes
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    made = {name: Plan.from_yaml(text) for name, text in plans.items()}
    steps = {name: step_of(plan, microbatches, name.endswith(COMPILED)) for name, plan in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            took = steps[name]()
            if turn >= 2:
                seconds[name].append(took)
    if rank == 0:
        first = next(iter(losses.values()))
        assert all(abs(a - b) <= 1e-5 * abs(b) for own in losses.values() for a, b in zip(own, first, strict=True))
        predicted = {name: plan.prediction.step_time_s for name, plan in made.items() if plan.prediction is not None}
        for name in steps:
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["1f1b"], strict=True))
            row = f"{statistics.median(seconds[name]):.3f} | {ratio:.3f} | {predicted[name] / predicted['1f1b']:.3f}"
            print(f"| {title} | {name} | {row} | {bubble_of(made['1f1b']):.1%} |", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--remat", default="full,selective,none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    print("| rematerialisation | schedule | s a step | to 1F1B's | predicted | bubble of 1F1B |")
    print("|---|---|---|---|---|---|", flush=True)
    for remat in given.remat.split(","):
        plans = {name: plan_of(given.ranks, given.microbatches, name, remat).to_yaml() for name in SCHEDULES}
        if given.compiled:
            plans |= {f"{name}{COMPILED}": plan for name, plan in plans.items()}
        with tempfile.TemporaryDirectory() as folder:
            args = (given.ranks, plans, given.microbatches, given.rounds, remat, folder)
            mp.start_processes(work, args=args, nprocs=given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
