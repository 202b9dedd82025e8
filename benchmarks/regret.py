"""Does the plan that is predicted to be fastest run fastest? Measured on two hosts of two ranks each.

    sudo python benchmarks/regret.py [--models gpt,moe] [--networks fast,1gbit,100mbit] [--rounds 10] [--final 20]

The hosts are two network namespaces of this machine, joined by a virtual cable whose rate ``tc`` sets. Each rank has an
equal share of a core at all times, as if it had a device of its own. For every network ``autopar profile``
measures the hosts, and a step how many rows each expert gets; a plan is searched for each model on that cluster, and
plans of every kind are estimated there.
All of them then train in rounds, a timed step of each plan a round, since the speed of a shared machine drifts; those
that may be the fastest in some more rounds.

What other machines take of the cores all the same is counted (steal), and a profile or a step from which they took
more than a percent or two is measured again, a few times at most.

Printed: the least seconds a step of each plan over the rounds, and the median, which says more where a machine has
rare moments in which it is faster; those predicted; how much longer the searched plan takes than the fastest of all
(regret); and the rank correlation of measured and predicted (Spearman). All times are written to
``OUT/NETWORK/MODEL.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_hosts import NETWORKS, RANKS, hosts, on_own_share, run_ranks, shares, stolen, ticks

from autopar.process_end import end_process

BATCH, SEQ, VOCAB = 16, 128, 2048
# Plans that take so many times the best of the rounds run in more of them.
NEAR = 1.12
# A measurement from which other machines took a greater share is repeated, so many times in all.
QUIET, TRIES = 0.015, 5


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=256, n_layer=4, n_head=8, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=SEQ,
        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return MixtralForCausalLM(config)


MODELS = {"gpt": gpt, "moe": moe}


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens.clone()}


def pins(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans of every kind, by what is pinned."""
    for zero in (0, 1, 2, 3):
        yield f"dp4 zero{zero}", {"dp": 4, "zero": zero, "num_microbatches": 1}
    yield "dp4 zero0 M2", {"dp": 4, "zero": 0, "num_microbatches": 2}
    yield "dp4 remat", {"dp": 4, "zero": 0, "num_microbatches": 1, "remat": "full"}
    yield "tp4", {"tp": 4, "sequence_parallel": False, "num_microbatches": 1}
    yield "tp4 sp", {"tp": 4, "sequence_parallel": True, "num_microbatches": 1}
    yield "cp4", {"cp": 4, "num_microbatches": 1}
    yield "dp2 cp2", {"dp": 2, "cp": 2, "num_microbatches": 1}
    for zero in (0, 3):
        yield f"dp2 tp2 zero{zero}", {"dp": 2, "tp": 2, "zero": zero, "sequence_parallel": False, "num_microbatches": 1}
    yield "dp2 tp2 sp", {"dp": 2, "tp": 2, "sequence_parallel": True, "num_microbatches": 1}
    yield "pp2 naive", {"pp": 2, "dp": 2, "schedule": "naive", "num_microbatches": 1}
    for schedule, count in (("gpipe", 4), ("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("zb-h1", 4)):
        yield f"pp2 dp2 {schedule} M{count}", {"pp": 2, "dp": 2, "schedule": schedule, "num_microbatches": count}
    yield "pp2 dp2 zero1 M4", {"pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b", "num_microbatches": 4}
    yield "pp2 tp2 M4", {"pp": 2, "tp": 2, "schedule": "1f1b", "sequence_parallel": False, "num_microbatches": 4}
    for schedule, count in (("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("zb-h1", 8)):
        yield f"pp4 {schedule} M{count}", {"pp": 4, "schedule": schedule, "num_microbatches": count}
    yield "pp2 dp2 interleaved M4", {
        "pp": 2, "dp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4,
    }  # fmt: skip
    if model == "moe":
        yield "ep4", {"ep": 4, "num_microbatches": 1}
        yield "ep2 dp2", {"ep": 2, "dp": 2, "num_microbatches": 1}
        yield "ep2 tp2", {"ep": 2, "tp": 2, "num_microbatches": 1}


def measured(job: Path) -> tuple[dict[str, Any], float]:
    """What ``autopar profile`` finds, and the share of the cores that others took: of the quietest of a few."""
    tried = []
    for _ in range(TRIES):
        before = ticks()
        tried.append((run_ranks(__file__, job), stolen(before, ticks())))
        if tried[-1][1] <= QUIET:
            break
    return min(tried, key=lambda one: one[1])


# What a rank does.


def worker(path: Path) -> None:
    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: Any
    if job["model"] is None:
        found = profiled(rank)
    else:
        found = trained(rank, job) if "plans" in job else routed(job)
    if rank == 0:
        path.with_suffix(".done.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


def profiled(rank: int) -> dict[str, Any]:
    from autopar.profiling.profile import profile

    with on_own_share(rank):
        return profile(lambda doing: None).description


def routed(job: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens that experts get, by layer, as the model is before training; {} without experts."""
    import autopar

    torch.manual_seed(0)
    parallel = autopar.parallelize(MODELS[job["model"]](), RANKS, example_inputs=batch(), dp=RANKS, zero=0)
    parallel.step(**parallel.shard_batch(batch()))
    return {layer: load.tolist() for layer, load in parallel.expert_load().items()}


def trained(rank: int, job: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of a step of each plan, one for each round."""
    import autopar

    steps = {}
    for name, plan in job["plans"].items():
        torch.manual_seed(0)
        model = MODELS[job["model"]]()
        parallel = autopar.parallelize(model, RANKS, example_inputs=batch(), plan=plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        steps[name] = partial(step, parallel, optimizer, parallel.shard_batch(batch()))
    found: dict[str, list[float]] = {name: [] for name in steps}
    names, disturbed = list(steps), 0
    for number in range(-1, job["rounds"] + job["final"]):
        if number == job["rounds"]:
            names = finalists(found)
        # The same order on all ranks, another one each round.
        for name in random.Random(number).sample(names, len(names)):
            run = steps[name]
            with on_own_share(rank):
                for _ in range(job["untimed"] if number >= 0 else 0):
                    run()
                seconds, lost = undisturbed(run)
            if number >= 0:
                found[name].append(seconds)
                disturbed += lost > QUIET
        if rank == 0:
            said = f"round {number + 1} of {job['rounds']} + {job['final']}, {disturbed} steps disturbed all the same"
            print(f"  {said}", file=sys.stderr, flush=True)
    return found


def undisturbed(run: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and the share of the cores that others took from it: of the least disturbed of a few."""
    tried = []
    for _ in range(TRIES):
        before = ticks()
        seconds = run()
        agreed = [(stolen(before, ticks()), seconds)]
        dist.broadcast_object_list(agreed, src=0)
        tried += agreed
        if agreed[0][0] <= QUIET:
            break
    lost, seconds = min(tried)
    return seconds, lost


def finalists(times: dict[str, list[float]]) -> list[str]:
    """The plans that may be the fastest, and the searched one, as rank 0 sees it."""
    best = [min(statistic(own) for own in times.values()) for statistic in (min, np.median)]
    near = [
        name
        for name, own in times.items()
        if name == "searched" or min(own) <= NEAR * best[0] or np.median(own) <= NEAR * best[1]
    ]
    agreed = [near]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def step(parallel: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    """Seconds until all ranks have done one."""
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    parallel.step(**inputs)
    optimizer.step()
    dist.barrier()
    return time.perf_counter() - start


# Plans, and what came of them.


def planned(
    model: str, description: dict[str, Any], loads: dict[str, list[int]], folder: Path, most: int
) -> dict[str, tuple[str, float]]:
    """Name -> plan file and predicted seconds, the searched one first. Others that are the same plan are left out."""
    from autopar.cost_model.cluster_file import cluster_from_dict
    from autopar.ir.capture.capture import capture
    from autopar.ir.errors import AutoparError
    from autopar.passes.normalise import normalise
    from autopar.search.api import estimate_captured, search_captured
    from autopar.search.problem.constraints import Constraints

    folder.mkdir(exist_ok=True)
    cluster = cluster_from_dict(description)
    captured = normalise(capture(MODELS[model](), batch()))
    found: dict[str, tuple[str, float]] = {}

    def add(name: str, result: Any) -> None:
        path = folder / f"{name.replace(' ', '_')}.yaml"
        result.plan.save(path)
        if found and path.read_text() == Path(found["searched"][0]).read_text():
            print(f"\nThe searched plan is {name}.")
            return
        found[name] = str(path), result.predicted.step_time_s

    usual = Constraints(precision="fp32", expert_load=tuple(map(tuple, loads.values())))
    add("searched", search_captured(captured, cluster, usual))
    for name, pinned in pins(model):
        if len(found) > most:
            break
        try:
            add(name, estimate_captured(captured, cluster, replace(usual, **pinned)))
        except AutoparError as error:
            print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def table(network: str, model: str, plans: dict[str, tuple[str, float]], times: dict[str, list[float]]) -> None:
    print(f"\n## {model}, {network}\n\n| plan | least s | median s | predicted s | error |\n|---|---|---|---|---|")
    least = {name: min(own) for name, own in times.items()}
    medians = {name: float(np.median(own)) for name, own in times.items()}
    for name in sorted(least, key=least.__getitem__):
        error = 100 * (plans[name][1] / least[name] - 1)
        print(f"| {name} | {least[name]:.3f} | {medians[name]:.3f} | {plans[name][1]:.3f} | {error:+.0f} % |")
    # Rounds of other times do not compare: the order is that of the rounds of all, the regret is among the finalists.
    rounds = min(map(len, times.values()))
    final = [name for name, own in times.items() if len(own) == len(times["searched"])]
    for kind, values, statistic in (("least", least, min), ("median", medians, np.median)):
        regret = 100 * (values["searched"] / min(values[name] for name in final) - 1)
        order = spearman([statistic(own[:rounds]) for own in times.values()], [plans[name][1] for name in times])
        print(f"\nBy the {kind} of the rounds: regret of the searched plan {regret:.1f} %, Spearman {order:.2f}.")
    print(f"\n{len(least)} plans in {rounds} rounds, {len(final)} in {len(times['searched'])}.", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--plans", type=int, default=99, help="at most, the searched one not counted")
    parser.add_argument("--rounds", type=int, default=10, help="timed, after one that is not")
    parser.add_argument("--final", type=int, default=20, help="more rounds of the plans that may be the fastest")
    parser.add_argument("--untimed", type=int, default=1, help="steps in a round before the timed one")
    parser.add_argument("--out", type=Path, default=Path("out/regret"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    # Whoever ends this process early leaves neither hosts nor the processes that keep the shares.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for network in options.networks.split(","):
        folder = options.out / network
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(shares())
            stack.enter_context(hosts(NETWORKS[network]))
            job = folder / "job.json"
            job.write_text(json.dumps({"model": None}))
            description, lost = measured(job)
            print(f"\n{network}, {lost:.1%} stolen: {json.dumps(description['inter_node'])}", flush=True)
            for model in options.models.split(","):
                job.write_text(json.dumps({"model": model}))
                plans = planned(model, description, run_ranks(__file__, job), folder / model, options.plans)
                files = {name: path for name, (path, _) in plans.items()}
                settings = {name: getattr(options, name) for name in ("rounds", "final", "untimed")}
                job.write_text(json.dumps({"model": model, "plans": files, **settings}))
                before = ticks()
                times = run_ranks(__file__, job)
                lost = stolen(before, ticks())
                predicted = {name: seconds for name, (_, seconds) in plans.items()}
                found = {"cluster": description, "predicted": predicted, "times": times, "stolen": lost}
                (folder / f"{model}.json").write_text(json.dumps(found))
                table(network, model, plans, times)
                print(f"\nOther machines took {lost:.1%} of the cores, less of the steps that count.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
