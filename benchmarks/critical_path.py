"""Does a step wait for what it is predicted to wait for? Measured on two hosts of two ranks each.

    sudo python benchmarks/critical_path.py [--model gpt] [--networks 100mbit] [--pin "pp2 dp2 1f1b M4"]... [--steps 5]

Hosts, network, shares of cores and the cluster file are those of ``regret.py``. A plan is searched there (and the best
of each kind taken that ``--pin`` names), every rank records torch.profiler traces of its steps, and the critical path
of each is read from them. Printed beside it: the critical path of the predicted step (``autopar explain
--critical-path``), and how long a rank stands still for each kind of communication.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import regret
import torch
import torch.distributed as dist
from measured_path import STEP, WAIT, critical_path, label, read_steps, waited
from two_hosts import NETWORKS, RANKS, hosts, on_own_share, run_ranks, shares

from autopar.checking.recorder import Communication, Recorder
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.process_end import end_process
from autopar.report.critical_path import critical_path_data
from autopar.search.api import estimate_captured, search_captured
from autopar.search.problem.constraints import Constraints

# A kind of communication with so great a share of a path is on it.
SHARE = 0.02


def worker(path: Path) -> None:
    """What a rank does: a trace of some steps, and what one step communicates."""
    import autopar

    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    parallel = autopar.parallelize(
        regret.MODELS[job["model"]](), RANKS, example_inputs=regret.batch(), plan=job["plan"]
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    inputs = parallel.shard_batch(regret.batch())
    untraced = [regret.step(parallel, optimizer, inputs)]
    with Recorder() as recorder:
        _step(parallel, optimizer, inputs)
    wait = dist.Work.wait

    def recorded(self: dist.Work, *args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(WAIT):
            return wait(self, *args, **options)

    with on_own_share(rank):
        untraced = [regret.step(parallel, optimizer, inputs) for _ in range(job["steps"])]
        dist.Work.wait = recorded  # type: ignore[method-assign]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(job["steps"] + 1):
                dist.barrier()
                with torch.profiler.record_function(STEP):
                    _step(parallel, optimizer, inputs)
    profile.export_chrome_trace(str(path.with_name(f"trace{rank}.json")))
    known = [(one.kind, one.ranks, one.numel) for one in recorder.communications]
    path.with_name(f"communications{rank}.json").write_text(json.dumps(known))
    if rank == 0:
        path.with_suffix(".done.json").write_text(json.dumps(untraced))
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def _step(parallel: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    parallel.step(**inputs)
    optimizer.step()


def planned(model: str, cluster: Cluster, pin: str | None) -> tuple[CapturedModel, Plan]:
    """The model, and the plan that is searched for it, or the best one of a kind."""
    captured = normalise(capture(regret.MODELS[model](), regret.batch()))
    usual = Constraints(precision="fp32")
    if pin is None:
        return captured, search_captured(captured, cluster, usual).plan
    return captured, estimate_captured(captured, cluster, replace(usual, **dict(regret.pins(model))[pin])).plan


def predicted(captured: CapturedModel, cluster: Cluster, plan: Plan) -> tuple[float, Counter[str]]:
    """Seconds of the simulated step, and of each kind of thing on its critical path."""
    found = critical_path_data(captured, cluster, plan)
    seconds: Counter[str] = Counter()
    for item in found["items"]:
        # What the core that computes copies for communication, a trace shows as slower compute.
        if item["kind"] not in ("collective", "send") or item["name"] == "copies":
            name = "compute"
        else:
            what = "send" if item["kind"] == "send" else item["name"]
            name = f"{what}, {item['axis'].replace(',', '')}"
        seconds[name] += item["step_s"]
    return found["step_time_s"], seconds


def measured(folder: Path, plan: Plan) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of a traced step, of each kind of thing on its critical path, and that a rank waits for each at most.

    The medians of all steps but the first.
    """
    ranks = []
    for rank in range(RANKS):
        known = json.loads((folder / f"communications{rank}.json").read_text())
        communications = [Communication(kind, tuple(own), numel, torch.float32) for kind, own, numel in known]
        ranks.append(read_steps(folder / f"trace{rank}.json", rank, communications)[1:])
    paths, waits, lengths = [], [], []
    for steps in zip(*ranks, strict=True):
        seconds: Counter[str] = Counter()
        for segment in critical_path(steps):
            seconds[label(segment.key, plan)] += (segment.end - segment.start) / 1e6
        paths.append(seconds)
        lengths.append(sum(seconds.values()))
        longest: Counter[str] = Counter()
        for step in steps:
            own: Counter[str] = Counter()
            for start, end, part in waited(step):
                own[label(part.key, plan)] += (end - start) / 1e6
            longest |= own
        waits.append(longest)
    return statistics.median(lengths), _medians(paths), _medians(waits)


def _medians(found: list[Counter[str]]) -> Counter[str]:
    return Counter({name: statistics.median(own[name] for own in found) for name in set().union(*found)})


def table(title: str, expected: tuple[float, Counter[str]], found: tuple[float, Counter[str], Counter[str]]) -> None:
    """Both paths side by side, and where they differ."""
    (step_s, on_path), (length_s, path, waits) = expected, found
    print(f"\n## {title}\n\n| on the critical path | predicted s | share | measured s | share | a rank waits s |")
    print("|---|---|---|---|---|---|")
    for name in sorted(set(on_path) | set(path) | set(waits), key=lambda name: -path[name]):
        shares_ = f"{on_path[name] / step_s:.0%} | {path[name]:.3f} | {path[name] / length_s:.0%}"
        print(f"| {name} | {on_path[name]:.3f} | {shares_} | {waits[name]:.3f} |")
    print(f"| all | {step_s:.3f} | | {length_s:.3f} | | |")
    named = {name for name in on_path if name != "compute" and on_path[name] >= SHARE * step_s}
    seen = {name for name in path if name != "compute" and path[name] >= SHARE * length_s}
    for said, names in (
        ("On both paths", named & seen), ("Predicted alone", named - seen), ("Measured alone", seen - named),
    ):  # fmt: skip
        print(f"\n{said}: {'; '.join(sorted(names)) or 'nothing'}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=regret.MODELS)
    parser.add_argument("--networks", default="100mbit")
    parser.add_argument(
        "--pin", action="append", default=[], help="a kind of plan of regret.py besides the searched one"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--known", action="store_true", help="take OUT/NETWORK/cluster.json for the hosts, if it is there"
    )
    parser.add_argument("--out", type=Path, default=Path("out/critical_path"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for network in options.networks.split(","):
        folder = options.out / network
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(shares())
            stack.enter_context(hosts(NETWORKS[network]))
            job = folder / "job.json"
            if not (options.known and (folder / "cluster.json").is_file()):
                job.write_text(json.dumps({"model": None}))
                (folder / "cluster.json").write_text(json.dumps(regret.measured(job)[0]))
            cluster = cluster_from_dict(json.loads((folder / "cluster.json").read_text()))
            for pin in (None, *options.pin):
                captured, plan = planned(options.model, cluster, pin)
                plan.save(folder / "plan.yaml")
                plan_file = str(folder / "plan.yaml")
                job.write_text(json.dumps({"model": options.model, "plan": plan_file, "steps": options.steps}))
                untraced = run_ranks(__file__, job)
                shape = f"{plan.num_stages} stages on {plan.stage_mesh}"
                title = f"{options.model}, {network}, {pin or 'searched'}: {shape}"
                table(title, predicted(captured, cluster, plan), measured(folder, plan))
                print(f"\nWithout traces a step takes {statistics.median(untraced):.3f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
