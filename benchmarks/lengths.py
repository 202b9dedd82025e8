"""Seconds a step on real text, packed and padded, beside those predicted from a histogram of its lengths.

    python benchmarks/lengths.py [--steps 100] [--plans dp2,tp2,pp2] [--documents functions] [--every 50]

The documents are the functions and methods of the standard library's source, or its files, in bytes, cut at the length
of a row. Two ranks on this machine, each on a core of its own, where other processes come last if there are control
groups for that. The plans train: every step is timed from one barrier to the next, its optimiser included, the loading
of its batch not; the first steps, in which programs are made, are left out.

The cores of a machine that others use too are up to a fifth slower at some minutes than at others. So what ``autopar
profile`` does, it does before every few of the steps, on the same ranks, and a plan is predicted for each of these
profiles from a histogram of the lengths alone. What is printed as predicted is the mean of these predictions; from and
to are the shortest and the longest of them. A profile does not see the model.

Printed: mean seconds of the steps, predicted and measured, and their ratio; what the plan's own prediction for full
rows without documents would have been; and the share of the cores that other machines took meanwhile (steal).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import sysconfig
import time
import warnings
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_hosts import ALLOCATOR, stolen, ticks

import autopar
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.lengths import LengthHistogram
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.planning_lengths import Dataset, with_lengths
from autopar.profiling.profile import profile
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from tests.harness import run_ranks

RANKS, ROWS, LONGEST = 2, 4, 1024
UNTIMED = 6
CGROUP, SHARES = Path("/sys/fs/cgroup/cpu"), 1 << 18
PINS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "zero": 0, "num_microbatches": 1},
    "dp2 zero3": {"dp": 2, "zero": 3, "num_microbatches": 2},
    "tp2": {"tp": 2, "num_microbatches": 1, "sequence_parallel": False},
    "pp2": {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"},
}


def documents(kind: str) -> list[Tensor]:
    """Functions or files, as bytes, in an order of their own."""
    found: list[bytes] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="ignore")
        if kind == "files":
            found.append(source.encode())
            continue
        functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        found += [(ast.get_source_segment(source, node) or "").encode() for node in functions]
    parts = [text[start : start + LONGEST] for text in found for start in range(0, len(text), LONGEST)]
    kept = [torch.tensor(list(part)) for part in parts if len(part) > 16]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    return [kept[number] for number in order]


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LONGEST, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def inputs() -> dict[str, Tensor]:
    """A global batch of full rows."""
    tokens = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": torch.arange(LONGEST).repeat(ROWS, 1)}


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Rows to the longest of them, each with one document."""
    shape = len(rows), max(map(len, rows))
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = labels[place, : len(row)] = row
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(shape[1]).expand(shape).contiguous()}


def on_own_core(rank: int) -> None:
    """Keep this process to one core, where it comes first."""
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    if CGROUP.is_dir():
        group = CGROUP / f"autopar-lengths-{rank}"
        group.mkdir(exist_ok=True)
        (group / "cpu.shares").write_text(str(SHARES))
        (group / "cgroup.procs").write_text(str(os.getpid()))


def profiled(seconds: float) -> dict[str, Any]:
    """The description of the cluster as it is now."""
    on_own_core(dist.get_rank())
    return profile(lambda doing: None, seconds=seconds).description


def trained(
    plan: str, kind: str, documents_of: str, steps: int, every: int, seconds: float
) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """Seconds of each step under a plan, of the loading before it, and the profiles made before every so many steps."""
    warnings.simplefilter("ignore")
    on_own_core(dist.get_rank())
    pm = autopar.parallelize(model(), RANKS, example_inputs=inputs(), plan=plan)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3, fused=True)
    data = documents(documents_of)
    loader = (
        pm.dataloader(data, pack=True, max_tokens=LONGEST)
        if kind == "packed"
        else pm.dataloader(data, collate_fn=padded)
    )
    # The first batch of another size than the plan's makes the program of all of them.
    pm.step(**pm.shard_batch(padded([data[0][: LONGEST // 2]] * ROWS)))
    taken, loading, profiles, untimed = list[float](), list[float](), list[dict[str, Any]](), UNTIMED
    while True:
        asked = time.perf_counter()
        for batch in loader:
            if untimed == 0 and len(taken) % every == 0:
                profiles.append(profile(lambda doing: None, seconds=seconds).description)
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            pm.step(**batch)
            optimizer.step()
            dist.barrier()
            end = time.perf_counter()
            if untimed > 0:
                untimed -= 1
            else:
                taken.append(end - start)
                loading.append(start - asked)
            if len(taken) == steps:
                return taken, loading, profiles
            asked = time.perf_counter()


@dataclass(slots=True)
class Planner:
    """Plans and predicts the model's training from a histogram of lengths, on a cluster as a profile describes it."""

    histogram: LengthHistogram
    captured: CapturedModel = field(default_factory=lambda: normalise(capture(model(), inputs())))

    def planned(self, name: str, kind: str, description: dict[str, Any]) -> Plan:
        """The plan of these pins with its prediction over the lengths, for a kind of batch."""
        cluster, dataset = cluster_from_dict(description), Dataset(histogram=self.histogram, packed=kind == "packed")
        limits = replace(Constraints(**PINS[name]), documents=dataset.documents_of(self.captured))
        plan = estimate_captured(self.captured, cluster, limits).plan
        return with_lengths(plan, dataset, self.captured, cluster, model(), inputs())

    def step_s(self, name: str, kind: str, description: dict[str, Any]) -> float:
        """Predicted seconds of a step, in the mean over the batches."""
        prediction = self.planned(name, kind, description).prediction
        assert prediction is not None and prediction.lengths is not None
        return prediction.lengths.step_time_s

    def full_s(self, name: str, description: dict[str, Any]) -> float:
        """Predicted seconds of a step of full rows, each one document."""
        limits = Constraints(**PINS[name])
        return estimate_captured(self.captured, cluster_from_dict(description), limits).predicted.step_time_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plans", default="dp2,tp2,pp2", help=f"of {', '.join(PINS)}")
    parser.add_argument("--documents", choices=("functions", "files"), default="functions")
    parser.add_argument("--every", type=int, default=50, help="steps between two profiles")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement of a profile")
    parser.add_argument("--out", type=Path, default=Path("out/lengths"))
    options = parser.parse_args()
    os.environ.update(ALLOCATOR)
    options.out.mkdir(parents=True, exist_ok=True)
    first, *_ = run_ranks(profiled, RANKS, options.seconds, limit_s=3600.0)
    on_own_core(0)  # ranks run later: this process waits for them
    data = documents(options.documents)
    planner = Planner(LengthHistogram.of(list(map(len, data))))
    print(f"{len(data):,} documents, {mean(map(len, data)):.0f} bytes in the mean, median {median(map(len, data)):.0f}")
    print("| plan | batches | predicted s | from | to | measured s | ratio | median s | full s | steal |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    ratios, kept = list[float](), dict[str, Any]()
    for name, kind in product(options.plans.split(","), ("packed", "padded")):
        path, before = options.out / f"{name.replace(' ', '_')}-{kind}.yaml", ticks()
        planner.planned(name, kind, first).save(path)
        steps = options.documents, options.steps, options.every, options.seconds
        (taken, loading, profiles), *_ = run_ranks(trained, RANKS, str(path), kind, *steps, limit_s=3600.0)
        steal = stolen(before, ticks())
        predicted = [planner.step_s(name, kind, description) for description in profiles]
        full_s = mean(planner.full_s(name, description) for description in profiles)
        ratios.append(mean(predicted) / mean(taken))
        kept[f"{name}, {kind}"] = {
            "measured_s": taken,
            "loading_s": loading,
            "profiles": profiles,
            "predicted_s": predicted,
        }
        print(
            f"| {name} | {kind} | {mean(predicted):.3f} | {min(predicted):.3f} | {max(predicted):.3f} "
            f"| {mean(taken):.3f} | {ratios[-1]:.2f} | {median(taken):.3f} | {full_s:.3f} | {steal:.1%} |",
            flush=True,
        )
    (options.out / "steps.json").write_text(json.dumps(kept))
    print(f"furthest from what was measured: {max(abs(ratio - 1) for ratio in ratios):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
