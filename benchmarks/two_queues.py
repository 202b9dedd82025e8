"""The pairs of DualPipeV at once and one after the other, on two hosts that experts are divided over.

    sudo python benchmarks/two_queues.py [--network 1gbit] [--rounds 9] [--rows 8] [--seq 256]

A mixture of experts in float32, two pipeline ranks on each host, tokens dispatched to experts between the hosts
(``two_hosts.py``). Plans take turns in one group of processes: 1F1B, ZB-V, and DualPipeV twice. Printed are the median
seconds of a step, the median of the ratios of each round to DualPipeV with one pass after the other, and how far losses
and parameters are from those of 1F1B.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_hosts import NETWORKS, RANKS, hosts, on_own_share, run_ranks, seconds_in_turns, shares, timed_step

import autopar
from autopar.process_end import end_process
from autopar.runtime import variants

VOCABULARY = 1024
SCHEDULES = {"1f1b": "1f1b", "zb-v": "zb-v", "dualpipe-v": "dualpipe-v", "dualpipe-v at once": "dualpipe-v"}
BASE = "dualpipe-v"


def model_of(job: dict[str, Any]) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=job["seq"],
        use_cache=False, output_router_logits=False,
    )  # fmt: skip
    model: nn.Module = MixtralForCausalLM(config)
    return model.train()


def batch(job: dict[str, Any]) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (job["rows"], job["seq"]), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens.clone()}


def worker(path: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with on_own_share(rank):
        found = trained(job)
    if rank == 0:
        path.with_suffix(".done.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds and losses of the steps of each plan, in turns, and how far parameters are from those of the first."""

    modules = {}
    for name, file in job["plans"].items():
        # What runs one after the other is told that nothing can run at once.
        off = mock.patch.object(variants, "run_at_once", lambda *_, **__: False)
        with ExitStack() as stack:
            if name == BASE:
                stack.enter_context(off)
            modules[name] = autopar.parallelize(model_of(job), RANKS, example_inputs=batch(job), plan=file)
    steps: dict[str, Callable[[], float]] = {}
    losses: dict[str, list[float]] = {name: [] for name in modules}
    for name, parallel in modules.items():
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2, momentum=0.9)
        steps[name] = partial(timed_step, parallel, optimizer, parallel.shard_batch(batch(job)), losses[name])
    seconds = seconds_in_turns(steps, job["rounds"])
    first, *others = (parallel.full_state_dict() for parallel in modules.values())
    apart = [max(((own[key] - value).norm() / value.norm()).item() for key, value in first.items()) for own in others]
    return {"seconds": seconds, "losses": losses, "apart": dict(zip(list(modules)[1:], apart, strict=True))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="1gbit", choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job: dict[str, Any] = {name: getattr(options, name) for name in ("rows", "seq", "rounds")}
        plans = {}
        for name, schedule in SCHEDULES.items():
            given: dict[str, Any] = {"pp": 2, "ep": 2, "schedule": schedule, "num_microbatches": job["rows"] // 2}
            plan = autopar.search(model_of(job), RANKS, example_inputs=batch(job), remat="none", zero=0, **given)
            plans[name] = str(folder / f"{name}.yaml")
            plan.save(plans[name])
        stack.enter_context(shares())
        stack.enter_context(hosts(NETWORKS[options.network]))
        file = folder / "job.json"
        file.write_text(json.dumps({**job, "plans": plans}))
        found = run_ranks(__file__, file, in_turns=True)
    print("| schedule | s a step | of one after the other | losses apart | parameters apart |\n|---|---|---|---|---|")
    for name, taken in found["seconds"].items():
        ratio = median(a / b for a, b in zip(taken, found["seconds"][BASE], strict=True))
        loss = max(abs(a / b - 1) for a, b in zip(found["losses"][name], found["losses"]["1f1b"], strict=True))
        print(f"| {name} | {median(taken):.3f} | {ratio:.3f} | {loss:.1e} | {found['apart'].get(name, 0):.1e} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
