"""Is every program proved that is not mutated? For every cell of ``parity.py``, which runs them; nothing is run here.

    python benchmarks/proof.py [--models gpt2,llama] [--plans "dp4;tp4"]

Each model under each plan, as the search finds it for that many ranks, becomes the programs of all stages: for the loss
of a training step and for the model's outputs, in train and in eval mode. ``verify_placements`` has to accept each.
Printed: for each model the cells, the programs (one for each stage), the plans that the search says the model cannot
have, and the modes that a plan is said not to fit; each program that is not proved, or fails to be made, with the
reason. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).parent))
from models import CASES, Case, build
from parity import PLANS, cells_of, constraints_of

from autopar.api import constraints_of as limits_of
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.capture import capture
from autopar.ir.errors import AutoparError, InfeasiblePlan, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place, place_like
from autopar.ir.plan import Plan
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.passes.verify.placements import verify_placements
from autopar.search.api import search_captured

RESULTS: tuple[Literal["loss", "model"], ...] = ("loss", "model")


def capture_case(case: Case, *, training: bool = True) -> CapturedModel:
    batch = dict(case.batch(0))
    extra = {"loss_fn": case.loss_fn, "example_target": batch.pop("target")} if case.loss_fn is not None else {}
    return normalise(capture(build(case), batch, training=training, **extra), check=False)


def plan_of(captured: CapturedModel, case: Case, name: str) -> Plan:
    """The plan that the search finds for the cell. Raises InfeasiblePlan if the model cannot have it."""
    cluster = local_cluster(PLANS[name][0], torch.device("cpu"))
    return search_captured(captured, cluster, limits_of(constraints_of(case, name))).plan


@dataclass(slots=True)
class Model:
    """A case, captured and analysed in train and in eval mode. counts: what was found of its cells."""

    case: Case
    train: Analysis
    eval: Analysis
    counts: Counter[str]

    @classmethod
    def of(cls, case: Case) -> Model:
        train, evaluated = (Analysis.of(capture_case(case, training=mode), None) for mode in (True, False))
        return cls(case, train, evaluated, Counter())

    def prove(self, name: str) -> None:
        """All programs of one cell."""
        self.counts["cells"] += 1
        try:
            plan = plan_of(self.train.captured, self.case, name)
        except InfeasiblePlan as error:
            self.counts["without a plan"] += 1
            print(f"{self.case.name:12} {name:16} cannot be: {str(error).splitlines()[0]}", flush=True)
            return
        trained = place(self.train, plan)
        for training, results in product((True, False), RESULTS):
            where = f"{self.case.name:12} {name:16} {results} in {'train' if training else 'eval'} mode"
            try:
                placed = trained if training else place_like(self.eval, trained)
                programs = partition(placed, outputs=results)
                verify_placements(placed.captured, programs, plan)
            except PlanMismatch as error:
                self.counts["without a mode"] += 1
                print(f"{where} cannot be: {str(error).splitlines()[0]}", flush=True)
            except (AutoparError, AssertionError) as error:
                self.counts["failed"] += 1
                print(f"{where} FAILED\n{type(error).__name__}: {error}", flush=True)
            else:
                self.counts["programs"] += len(programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--plans", default=";".join(PLANS))
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for name in options.models.split(","):
        start, model = time.perf_counter(), Model.of(CASES[name])
        for _, plan in cells_of([name], options.plans.split(";")):
            model.prove(plan)
        print(f"{name:12} {dict(model.counts)}, {time.perf_counter() - start:.0f} s", flush=True)
        total += model.counts
    print(f"all          {dict(total)}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
