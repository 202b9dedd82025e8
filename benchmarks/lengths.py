"""Seconds a step on real text, packed and padded, beside those predicted from a histogram of its lengths.

    python benchmarks/lengths.py [--steps 100] [--plans dp2,tp2,pp2] [--documents functions] [--cluster cluster.yaml]

The documents are the functions and methods of the standard library's source, or its files, in bytes, cut at the length
of a row. Two ranks on this machine, each on a core of its own, where other processes come last if there are control
groups for that. ``autopar profile`` measures the two (unless a cluster file is given), and each plan is predicted from
a histogram of the lengths alone. Then the plans train: every step is timed from one barrier to the next, its optimiser
included, the loading of its batch not; the first steps, in which programs are made, are left out.

Printed: mean seconds of the steps, predicted and measured, their ratio, and what the plan's own prediction for full
rows without documents would have been. reference: seconds of a fixed piece of work on all ranks at once, every few
steps, over those at the profile, as the cores of a machine that others use too are not equally fast for long;
corrected: the ratio if the prediction is multiplied by it. steal: share of the cores that other machines took
meanwhile.
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
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from two_hosts import ALLOCATOR, stolen, ticks

import autopar
from autopar.ir.lengths import LengthHistogram
from tests.harness import run_ranks

RANKS, ROWS, LONGEST = 2, 4, 1024
UNTIMED = 6
# Steps between two measurements of a reference, and how many are made before and after a profile.
EVERY, REFERENCES = 4, 30
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


def reference() -> float:
    """Seconds, here and now, of a feed-forward layer of the model's size, forward and backward, on every rank."""
    x = torch.ones(LONGEST, 256, requires_grad=True)
    up, down = (torch.full(shape, 0.01, requires_grad=True) for shape in ((512, 256), (256, 512)))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        F.linear(F.silu(F.linear(x, up)), down).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def profiled(seconds: float) -> tuple[dict[str, Any], float]:
    """The description of the cluster, and the seconds of the reference before and after."""
    from autopar.profiling.profile import profile

    on_own_core(dist.get_rank())
    reference()
    references = [reference() for _ in range(REFERENCES)]
    description = profile(lambda doing: None, seconds=seconds).description
    return description, mean(references + [reference() for _ in range(REFERENCES)])


def trained(plan: str, kind: str, documents_of: str, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step under a plan, of the loading before it, and of the reference beside them."""
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
    reference()
    taken, loading, references = list[float](), list[float](), list[float]()
    while True:
        asked = time.perf_counter()
        for batch in loader:
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            pm.step(**batch)
            optimizer.step()
            dist.barrier()
            end = time.perf_counter()
            taken.append(end - start)
            loading.append(start - asked)
            if len(taken) == steps + UNTIMED:
                return taken[UNTIMED:], loading[UNTIMED:], references
            if len(taken) % EVERY == 0:
                references.append(reference())
            asked = time.perf_counter()


def planned(names: list[str], cluster: dict[str, Any], histogram: LengthHistogram, folder: Path) -> dict[Any, Any]:
    """(plan, kind of batch) -> the plan's file, its prediction over lengths, and that of full rows."""
    from autopar.cost_model.cluster_file import cluster_from_dict
    from autopar.ir.capture.capture import capture
    from autopar.passes.normalise import normalise
    from autopar.planning_lengths import Dataset, with_lengths
    from autopar.search.api import estimate_captured
    from autopar.search.problem.constraints import Constraints

    described, captured = cluster_from_dict(cluster), normalise(capture(model(), inputs()))
    found = {}
    for name in names:
        whole = estimate_captured(captured, described, Constraints(**PINS[name])).predicted.step_time_s
        for kind in ("packed", "padded"):
            dataset = Dataset(histogram=histogram, packed=kind == "packed")
            limits = replace(Constraints(**PINS[name]), documents=dataset.documents_of(captured))
            plan = estimate_captured(captured, described, limits).plan
            plan = with_lengths(plan, dataset, captured, described, model(), inputs())
            path = folder / f"{name.replace(' ', '_')}-{kind}.yaml"
            plan.save(path)
            assert plan.prediction is not None
            found[name, kind] = str(path), plan.prediction.lengths, whole
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plans", default="dp2,tp2,pp2", help=f"of {', '.join(PINS)}")
    parser.add_argument("--documents", choices=("functions", "files"), default="functions")
    parser.add_argument("--cluster", type=Path, help="of this machine, instead of a profile")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement of the profile")
    parser.add_argument("--out", type=Path, default=Path("out/lengths"))
    options = parser.parse_args()
    os.environ.update(ALLOCATOR)
    options.out.mkdir(parents=True, exist_ok=True)
    before = ticks()
    if options.cluster is None:
        (cluster, usual), *_ = run_ranks(profiled, RANKS, options.seconds, limit_s=3600.0)
        (options.out / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))
    else:
        cluster, usual = yaml.safe_load(options.cluster.read_text()), float("nan")
    print(f"profile: {stolen(before, ticks()):.1%} stolen, load {os.getloadavg()[0]:.1f}", flush=True)
    on_own_core(0)  # ranks run later: this process waits for them
    data = documents(options.documents)
    histogram = LengthHistogram.of(list(map(len, data)))
    histogram.save(options.out / "lengths.json")
    print(f"{len(data):,} documents, {mean(map(len, data)):.0f} bytes in the mean, median {median(map(len, data)):.0f}")
    plans = planned(options.plans.split(","), cluster, histogram, options.out)
    print("| plan | batches | predicted s | measured s | ratio | reference | corrected | median s | full s | steal |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    ratios, kept = list[tuple[float, float]](), {}
    for (name, kind), (path, predicted, whole) in plans.items():
        before = ticks()
        found, *_ = run_ranks(trained, RANKS, path, kind, options.documents, options.steps, limit_s=3600.0)
        taken, loading, references = found
        ratio, slower = predicted.step_time_s / mean(taken), mean(references) / usual
        ratios.append((ratio, slower * ratio))
        kept[f"{name}, {kind}"] = {
            "predicted": predicted.model_dump(),
            "measured_s": taken,
            "loading_s": loading,
            "reference_s": references,
            "reference_at_profile_s": usual,
        }
        print(
            f"| {name} | {kind} | {predicted.step_time_s:.3f} | {mean(taken):.3f} | {ratio:.2f} | {slower:.2f} "
            f"| {slower * ratio:.2f} | {median(taken):.3f} | {whole:.3f} | {stolen(before, ticks()):.1%} |",
            flush=True,
        )
    (options.out / "steps.json").write_text(json.dumps(kept))
    for name, own in zip(("as measured", "corrected by the reference"), zip(*ratios, strict=True), strict=True):
        print(f"furthest from what was measured, {name}: {max(abs(ratio - 1) for ratio in own):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
