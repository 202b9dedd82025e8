"""Does the proof of a program refuse every mutant that changes a loss or a gradient?

    python benchmarks/mutants.py [--models llama,gpt2] [--plans "dp2 tp2;tp2 sp"] [--count 1000] [--refused 20]

Mutants of correct programs (``tests/passes/verify/mutations.py``), as many of each kind as of any other, are given to
``verify_placements``. Those that it accepts, and ``--refused`` of those that it refuses, are run for one step on gloo
ranks, and the loss and all gradients compared with one process. Printed: for each kind, how many are refused, how many
are accepted, and of those how many change something. Exits with 1 if an accepted one does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from models import CASES, Case, build
from parity import LIMITS, PLANS, constraints_of
from traces import Steps, Trace, relative, train_alone, train_parallel

import autopar.api
from autopar.ir.capture.capture import capture
from autopar.ir.errors import AutoparError, InfeasiblePlan, UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import PlacedModel, place_captured
from autopar.ir.plan import Plan
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.search.api import search_captured
from tests.passes.verify.mutations import Mutant, mutants
from tests.patience import Patience

MODELS = "gpt2,llama,t5,mixtral,deepseek_v3,gemma2,vit,mlp"
CHOSEN = "dp2 tp2;tp2 sp;cp2;zero1;tp2 pp2;ep2"
OTHERWISE = "dp2 pp2"  # of models without experts, instead of a plan with some
ONE = Steps(sgd=1, adamw=0, compared=(0,))
# Seconds in which ranks that do nothing wait for each other for ever, and seconds of CPU time that are enough for all.
IDLE_S, LIMIT_S = 30.0, 3600.0


@dataclass(frozen=True, slots=True)
class Judged:
    """number: of the mutant among all of its cell. changed: what execution says, None if it was not run."""

    model: str
    plan: str
    number: int
    mutant: Mutant
    accepted: bool
    changed: bool | None = None
    text: str = ""


def capture_case(case: Case) -> CapturedModel:
    batch = dict(case.batch(0))
    extra = {"loss_fn": case.loss_fn, "example_target": batch.pop("target")} if case.loss_fn is not None else {}
    return normalise(capture(build(case), batch, **extra), check=False)


def balanced(every: Sequence[Mutant], count: int, draw: random.Random) -> list[int]:
    """Numbers of ``count`` mutants, those of all kinds in turn."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(every):
        by_kind[mutant.kind].append(number)
    for numbers in by_kind.values():
        draw.shuffle(numbers)
    turns = chain.from_iterable(zip_longest(*by_kind.values()))
    return [number for number in turns if number is not None][:count]


def judge(captured: CapturedModel, case: Case, name: str, plan: Plan, count: int, draw: random.Random) -> list[Judged]:
    """``count`` mutants of one cell, accepted or refused. Those that cannot be made (no valid graph) are left out."""
    placed = place_captured(captured, plan)
    captured, programs = placed.captured, partition(placed)
    verify_placements(captured, programs, plan)
    every = list(mutants(programs))
    found = []
    for number in balanced(every, count, draw):
        try:
            mutated = every[number].make()
        except RuntimeError:
            continue
        try:
            verify_placements(captured, mutated, plan)
        except UnprovenProgram as error:
            found.append(Judged(case.name, name, number, every[number], False, text=str(error)))
        else:
            found.append(Judged(case.name, name, number, every[number], True))
    return found


def _worker(rank: int, model: str, plan: Plan, numbers: Sequence[int], folder: str) -> None:
    """Body of a rank: a step of each mutant. A line for each that ran; what does not run ends the group."""
    world = plan.num_ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    case = CASES[model]
    alone = train_alone(case, ONE)
    with open(f"{folder}/rank{rank}.jsonl", "w") as results:
        for number in numbers:
            try:
                trace = _train_mutant(case, plan, number)
                # A parameter or the loss of one rank may be right where that of another is not.
                wrong = [None] * world
                dist.all_gather_object(wrong, _errors(trace, alone))
                text = next((one for one in wrong if one), "")
            except Exception as error:  # whatever it is, the mutant does not train the model
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                results.write(json.dumps({"number": number, "changed": text}) + "\n")
                results.flush()
                os._exit(1)
            results.write(json.dumps({"number": number, "changed": text}) + "\n")
            results.flush()


def _train_mutant(case: Case, plan: Plan, number: int) -> Trace:
    def mutated(placed: PlacedModel, **options: object) -> object:
        return list(mutants(partition(placed)))[number].make()

    with patch.object(autopar.api, "partition", mutated), patch.object(autopar.api, "verify_placements"):
        return train_parallel(case, plan.num_ranks, {"plan": plan}, ONE)[0]


def _errors(trace: Trace, alone: Trace) -> str:
    """What differs from one process beyond the limits; empty if nothing does."""
    loss = abs(trace.losses[0] - alone.losses[0]) / abs(alone.losses[0])
    gradient = relative(trace.gradients[0], alone.gradients[0], alone.zeros[0])
    parameter = relative(trace.parameters, alone.parameters)
    found = {"loss": loss, "gradient": gradient, "parameter": parameter}
    return ", ".join(f"{name} {error:.1e}" for name, error in found.items() if not error <= LIMITS[name])


def execute(model: str, plan: Plan, numbers: Sequence[int]) -> dict[int, str]:
    """Number of a mutant -> what it changes; empty if nothing. A failure ends its group, and another one goes on."""
    found: dict[int, str] = {}
    while left := [number for number in numbers if number not in found]:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.start_processes(
                _worker, args=(model, plan, left, folder), nprocs=plan.num_ranks, join=False, start_method="spawn"
            )
            _wait(context)
            for path in sorted(Path(folder).glob("rank*.jsonl")):
                for line in map(json.loads, path.read_text().splitlines()):
                    found[line["number"]] = found.get(line["number"]) or line["changed"]
        if left[0] not in found:
            found[left[0]] = "no rank came to its end"
    return found


def _wait(context: mp.ProcessContext) -> None:
    """Until all ranks have ended; those that wait for each other are killed."""
    patience = Patience([process.pid or 0 for process in context.processes], idle_s=IDLE_S, limit_s=LIMIT_S)
    try:
        while not context.join(timeout=patience.pause_s):
            if patience.lost() is not None:
                break
    except (mp.ProcessExitedException, mp.ProcessRaisedException):
        pass
    for process in context.processes:
        if process.is_alive():
            process.kill()
            process.join()


def table(judged: Sequence[Judged]) -> str:
    """Markdown: a line for each kind."""
    lines = ["| mutant | refused | of them run | changed | accepted | changed |", "|---|---|---|---|---|---|"]
    for kind in [*dict.fromkeys(one.mutant.kind for one in judged), None]:
        own = [one for one in judged if kind in (None, one.mutant.kind)]
        refused, accepted = ([one for one in own if one.accepted is wanted] for wanted in (False, True))
        run = [one for one in refused if one.changed is not None]
        counts = len(refused), len(run), sum(map(_changed, run)), len(accepted), sum(map(_changed, accepted))
        lines.append(f"| {kind or 'all'} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _changed(one: Judged) -> bool:
    return bool(one.changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--plans", default=CHOSEN)
    parser.add_argument("--count", type=int, default=1000, help="mutants in all")
    parser.add_argument("--refused", type=int, default=0, help="refused ones to run too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models, names = options.models.split(","), options.plans.split(";")
    draw, each = random.Random(options.seed), -(-options.count // (len(models) * len(names)))
    judged: list[Judged] = []
    for model in models:
        captured = capture_case(CASES[model])
        for name in names:
            try:
                plan = _plan(captured, CASES[model], name)
            except InfeasiblePlan:
                name = OTHERWISE
                plan = _plan(captured, CASES[model], name)
            cell = judge(captured, CASES[model], name, plan, each, draw)
            refused = [one.number for one in cell if not one.accepted]
            sample = draw.sample(refused, min(len(refused), -(-options.refused // (len(models) * len(names)))))
            chosen = [one.number for one in cell if one.accepted] + sample
            changed = execute(model, plan, chosen)
            judged += [
                replace(one, changed=bool(changed[one.number]), text=changed[one.number])
                if one.number in changed
                else one
                for one in cell
            ]
            counts = Counter(one.accepted for one in cell)
            print(f"{model:12} {name:10} {counts[False]} refused, {counts[True]} accepted", flush=True)
            for one in judged[-len(cell) :]:
                if one.accepted:
                    print(f"    {'WRONG ' + one.text if one.changed else 'the same'}: {one.mutant}", flush=True)
                elif one.changed is False:
                    print(f"    refused, and the same: {one.mutant}", flush=True)
    print(table(judged))
    return 1 if any(one.accepted and one.changed for one in judged) else 0


def _plan(captured: CapturedModel, case: Case, name: str) -> Plan:
    """The plan that the search finds. Raises InfeasiblePlan if the model cannot have it."""
    cluster = local_cluster(PLANS[name][0], torch.device("cpu"))
    limits = autopar.api.constraints_of(constraints_of(case, name))
    try:
        return search_captured(captured, cluster, limits).plan
    except AutoparError as error:
        raise InfeasiblePlan(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
