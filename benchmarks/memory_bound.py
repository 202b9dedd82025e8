"""Memory-bound plans of two versions of this project, trained in turns on two hosts joined at 1 Gbit/s.

    sudo python benchmarks/memory_bound.py --before TREE [--memory-gb 0.95] [--rows 4] [--rounds 9] [--network 1gbit]

The hosts are those of ``two_hosts.py``: two ranks each, which have half a core at all times. ``autopar profile``
measures them, unless ``--cluster`` is a file that it wrote; each rank may then use ``--memory-gb``. Both versions plan
a Llama of 16 layers in float32 for it: the earlier one is a checkout in the folder TREE, which only plans. Both plans
are then trained by this version, in turns in one group of processes. Printed are the median of the ratios of each
round, the seconds beside those that each version predicted, the bytes predicted, and how far losses are apart.
``--plan-only`` stops before, and takes several sizes of memory: with commas between.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_hosts import NETWORKS, RANKS, hosts, on_own_share, run_ranks, seconds_in_turns, shares, timed_step

from autopar.process_end import end_process

ROOT = Path(__file__).parent.parent
VOCABULARY = 4096
# What cluster files say that an earlier version may not know.
SINCE = ("functions_ns",)


def model_of(job: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=job["width"], intermediate_size=43 * job["width"] // 16,
        num_hidden_layers=job["layers"], num_attention_heads=job["width"] // 64, max_position_embeddings=job["seq"],
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batch(job: dict[str, Any]) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (job["rows"], job["seq"]), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens.clone()}


# What a process of its own does, with the version that its path names.


def plan(job: dict[str, Any]) -> dict[str, Any]:
    """The best plan, as text, or why there is none."""
    from autopar.cost_model.cluster_file import cluster_from_dict
    from autopar.ir.capture.capture import capture
    from autopar.ir.errors import AutoparError
    from autopar.passes.normalise import normalise
    from autopar.report.words import one_line
    from autopar.search.api import search_captured
    from autopar.search.problem.constraints import Constraints

    captured = normalise(capture(model_of(job), batch(job)))
    found: dict[str, Any] = {}
    for memory_gb in job["memory_gb"]:
        cluster = cluster_from_dict(job["cluster"] | {"memory_gb": memory_gb})
        try:
            result = search_captured(captured, cluster, Constraints(precision="fp32"))
        except AutoparError as error:
            found[str(memory_gb)] = {"words": str(error).splitlines()[0], "step_s": None}
            continue
        found[str(memory_gb)] = {
            "plan": result.plan.to_yaml(),
            "words": f"{one_line(result.plan)}; {', '.join(str(stage.remat) for stage in result.plan.stages)}",
            "step_s": result.predicted.step_time_s,
            "gib": result.predicted.peak_bytes / 2**30,
        }
    return found


def worker(path: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with on_own_share(rank):
        found: Any = trained(job) if "plans" in job else profiled()
    if rank == 0:
        path.with_suffix(".done.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def profiled() -> dict[str, Any]:
    from autopar.profiling.profile import profile

    return profile(lambda doing: None).description


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds and losses of the steps of each plan, in turns."""
    import autopar

    steps: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {name: [] for name in job["plans"]}
    for name, file in job["plans"].items():
        parallel = autopar.parallelize(model_of(job), RANKS, example_inputs=batch(job), plan=file)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        steps[name] = partial(timed_step, parallel, optimizer, parallel.shard_batch(batch(job)), losses[name])
    seconds = seconds_in_turns(steps, job["rounds"])
    return {"seconds": seconds, "losses": losses}


# The whole.


def planned(job: dict[str, Any], tree: Path, folder: Path) -> dict[str, Any]:
    """What the version in ``tree`` plans."""
    file = folder / "plan.json"
    file.write_text(json.dumps(job))
    environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
    subprocess.run([sys.executable, __file__, "--plan", str(file.resolve())], check=True, env=environment, cwd=folder)
    found: dict[str, Any] = json.loads(file.with_suffix(".done.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder with a checkout of an earlier version")
    parser.add_argument("--memory-gb", default="0.95", help="of each rank")
    parser.add_argument("--cluster", type=Path, help="file of autopar profile, in JSON, instead of measuring")
    parser.add_argument("--network", default="1gbit", choices=list(NETWORKS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9, help="timed, after one that is not")
    parser.add_argument("--out", type=Path, default=Path("out/memory_bound"))
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if options.plan:
        found = plan(json.loads(options.plan.read_text()))
        options.plan.with_suffix(".done.json").write_text(json.dumps(found))
        return 0
    if options.before is None:
        parser.error("--before names the folder of an earlier version")
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "job.json"
    job: dict[str, Any] = {name: getattr(options, name) for name in ("width", "layers", "rows", "seq", "rounds")}
    job["memory_gb"] = [float(word) for word in options.memory_gb.split(",")]
    with ExitStack() as stack:
        stack.enter_context(shares())
        stack.enter_context(hosts(NETWORKS[options.network]))
        if options.cluster is None:
            file.write_text(json.dumps(job))
            description = run_ranks(__file__, file)
            (options.out / "cluster.json").write_text(json.dumps(description))
        else:
            description = json.loads(options.cluster.read_text())
        described = {"before": {k: v for k, v in description.items() if k not in SINCE}, "now": description}
        plans = {
            name: planned(job | {"cluster": described[name]}, tree, options.out)
            for name, tree in (("before", options.before), ("now", ROOT))
        }
        print("| GB a rank | version | plan | predicted s | predicted GiB |\n|---|---|---|---|---|")
        for memory_gb in map(str, job["memory_gb"]):
            for name, found in plans.items():
                own = found[memory_gb]
                figures = ("", "") if own["step_s"] is None else (f"{own['step_s']:.3f}", f"{own['gib']:.2f}")
                print(f"| {memory_gb} | {name} | {own['words']} | {' | '.join(figures)} |", flush=True)
        if options.plan_only:
            return 0
        own = {name: found[str(job["memory_gb"][0])] for name, found in plans.items()}
        if any(one["step_s"] is None for one in own.values()):
            parser.error("a version finds no plan for so little memory")
        job["plans"] = {}
        for name, one in own.items():
            path = options.out / f"{name}.yaml"
            path.write_text(one["plan"])
            job["plans"][name] = str(path.resolve())
        file.write_text(json.dumps(job))
        found = run_ranks(__file__, file)
    (options.out / "found.json").write_text(json.dumps({"plans": own, **found}))
    before, now = (found["seconds"][name] for name in ("before", "now"))
    print("\n| version | median s a step | predicted s |\n|---|---|---|")
    for name in own:
        print(f"| {name} | {median(found['seconds'][name]):.3f} | {own[name]['step_s']:.3f} |")
    ratios = sorted(a / b for a, b in zip(before, now, strict=True))
    apart = max(abs(a / b - 1) for a, b in zip(*found["losses"].values(), strict=True))
    predicted = own["before"]["step_s"] / own["now"]["step_s"]
    print(
        f"\nBefore by now: {median(ratios):.3f} in the median of {len(ratios)} rounds, {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f}; predicted {predicted:.3f}. Losses are {apart:.1e} apart."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
