"""Does the proof of a program refuse every mutant that changes a loss or a gradient?

    python benchmarks/mutants.py [--models llama,gpt2] [--plans "dp2 tp2;tp2 sp"] [--count 1000] [--refused 20]
                                 [--kinds "schedule actions swapped"]

Mutants of correct programs (``tests/passes/verify/mutations.py``), as many of each kind as of any other, are given to
``verify_placements`` and ``verify_schedule``. Those that they accept, and ``--refused`` of those that they refuse, are
run for one step on gloo ranks, and the loss and all gradients compared with one process. Printed: for each kind, how
many are refused, how many are accepted, and of those how many change something. Exits with 1 if an accepted one does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from models import CASES, Case
from parity import LIMITS, cells_of
from proof import capture_case, plan_of
from traces import Steps, Trace, relative, train_alone, train_parallel

import autopar.api
from autopar.ir.errors import UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import PlacedModel, place_captured
from autopar.ir.plan import Plan
from autopar.ir.schedule import Pipelining
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from tests.passes.verify.mutations import Mutant, mutants
from tests.patience import Patience

MODELS = "gpt2,llama,t5,mixtral,deepseek_v3,gemma2,vit,mlp"
CHOSEN = "dp2 tp2;tp2 sp;cp2;zero1;tp2 pp2;ep2"
OTHERWISE = "dp2 pp2"  # of models without experts, instead of a plan with some
ONE = Steps(sgd=1, adamw=0, compared=(0,))
# Seconds in which ranks that do nothing wait for each other for ever, and seconds of CPU time that are enough for all.
IDLE_S, LIMIT_S = 30.0, 3600.0
TRIES = 2  # on a machine that does twenty things at once, ranks may stand still that do not wait for each other


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


@dataclass(slots=True)
class Judge:
    """Draws mutants and has the proof judge them.

    each: how many of a cell. kinds: those that are wanted, all if empty. counts: how many of each kind are judged, of
    all cells.
    """

    each: int
    kinds: frozenset[str]
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def cell(self, captured: CapturedModel, model: str, name: str, plan: Plan) -> list[Judged]:
        """Mutants of one cell; the next one is of a kind of which fewest are judged.

        Those that cannot be made (no valid graph) are left out.
        """
        placed = place_captured(captured, plan)
        captured, programs = placed.captured, partition(placed)
        verify_placements(captured, programs, plan)
        every = list(mutants(programs, plan.pipelining))
        waiting: dict[str, list[int]] = defaultdict(list)
        for number in self.draw.sample(range(len(every)), len(every)):
            if not self.kinds or every[number].kind in self.kinds:
                waiting[every[number].kind].append(number)
        found: list[Judged] = []
        while len(found) < self.each and waiting:
            kind = min(waiting, key=self.counts.__getitem__)
            number = waiting[kind].pop()
            if not waiting[kind]:
                del waiting[kind]
            try:
                every[number].verify(captured, plan)
            except UnprovenProgram as error:
                found.append(Judged(model, name, number, every[number], False, text=str(error)))
            except RuntimeError:
                continue
            else:
                found.append(Judged(model, name, number, every[number], True))
            self.counts[kind] += 1
        return found


def _worker(rank: int, model: str, plan: Plan, chosen: Mapping[int, str], folder: str) -> None:
    """Body of a rank: a step of each mutant. A line for each that ran; what does not run ends the group."""
    world = plan.num_ranks
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    case = CASES[model]
    alone = train_alone(case, ONE)
    with open(f"{folder}/rank{rank}.jsonl", "w") as results:
        for number, name in chosen.items():
            try:
                trace = _train_mutant(case, plan, number, name)
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


def _train_mutant(case: Case, plan: Plan, number: int, name: str) -> Trace:
    with ExitStack() as stack:

        def mutated(placed: PlacedModel, **options: object) -> object:
            mutant = list(mutants(partition(placed), plan.pipelining))[number]
            assert str(mutant) == name, f"{mutant} is another mutant than {name}"
            if mutant.orders is not None:
                stack.enter_context(patch.object(Pipelining, "orders", lambda shape: mutant.orders))
            return mutant.make()

        stack.enter_context(patch.object(autopar.api, "partition", mutated))
        stack.enter_context(patch.object(autopar.api, "verify_placements"))
        return train_parallel(case, plan.num_ranks, {"plan": plan}, ONE)[0]


def _errors(trace: Trace, alone: Trace) -> str:
    """What differs from one process beyond the limits; empty if nothing does."""
    loss = abs(trace.losses[0] - alone.losses[0]) / abs(alone.losses[0])
    gradient = relative(trace.gradients[0], alone.gradients[0], alone.zeros[0])
    parameter = relative(trace.parameters, alone.parameters)
    found = {"loss": loss, "gradient": gradient, "parameter": parameter}
    return ", ".join(f"{name} {error:.1e}" for name, error in found.items() if not error <= LIMITS[name])


def execute(model: str, plan: Plan, chosen: Mapping[int, str]) -> dict[int, str]:
    """Number of a mutant -> what it changes; empty if nothing. A failure ends its group, and another one goes on.

    chosen: number -> the mutant as text, which the ranks hold against what they make under that number.
    """
    found: dict[int, str] = {}
    stood_still: Counter[int] = Counter()
    while left := {number: text for number, text in chosen.items() if number not in found}:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.start_processes(
                _worker, args=(model, plan, left, folder), nprocs=plan.num_ranks, join=False, start_method="spawn"
            )
            _wait(context)
            for path in sorted(Path(folder).glob("rank*.jsonl")):
                for line in map(json.loads, path.read_text().splitlines()):
                    found[line["number"]] = found.get(line["number"]) or line["changed"]
        first = next(iter(left))
        stood_still[first] += first not in found
        if stood_still[first] == TRIES:
            found[first] = "no rank came to its end"
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
    parser.add_argument("--kinds", help="kind;... instead of all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cells = list(product(options.models.split(","), options.plans.split(";")))
    draw, each = random.Random(options.seed), -(-options.count // len(cells))
    judge = Judge(each, frozenset(options.kinds.split(";") if options.kinds else ()), draw)
    captured = {model: capture_case(CASES[model]) for model, _ in cells}
    judged: list[Judged] = []
    for model, name in cells:
        name = name if cells_of([model], [name]) else OTHERWISE
        plan = plan_of(captured[model], CASES[model], name)
        cell = judge.cell(captured[model], model, name, plan)
        refused = [one for one in cell if not one.accepted]
        sample = draw.sample(refused, min(len(refused), -(-options.refused // len(cells))))
        chosen = {one.number: str(one.mutant) for one in cell if one.accepted or one in sample}
        changed = execute(model, plan, chosen)
        cell = [
            replace(one, changed=bool(changed[one.number]), text=changed[one.number]) if one.number in changed else one
            for one in cell
        ]
        counts = Counter(one.accepted for one in cell)
        print(f"{model:12} {name:16} {counts[False]} refused, {counts[True]} accepted", flush=True)
        for one in cell:
            if one.accepted:
                print(f"    {'WRONG ' + one.text if one.changed else 'the same'}: {one.mutant}", flush=True)
            elif one.changed is False:
                print(f"    refused, and the same: {one.mutant}", flush=True)
        judged += cell
    print(table(judged))
    return 1 if any(one.accepted and one.changed for one in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
