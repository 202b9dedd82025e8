"""Are costs from one capture with symbols those of a capture at each size? For the models of ``parity.py``.

    python benchmarks/one_capture.py [--models llama,t5] [--sizes 10]

A model is captured once with symbols for its batch and lengths, and again at each of ten random sizes. Compared,
exactly: floating point operations of every op, bytes of every tensor, bytes that every op keeps for the backward, and
the records of all communication (kind, axes, payload, how often) of a step on a mesh dp=2, tp=2 as a search places the
model there; where such a plan does not divide a size, both captures have to be refused it with the same words. Printed:
sizes at which all are equal, at how many of them payloads too; sizes for which the capture says that it does not hold,
with the reason; and how long both ways take. Exits with 1 if a figure differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.stacks.known import AUTOPAR
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at
from autopar.ir.capture.symbols import named_dims
from autopar.ir.errors import AutoparError, CaptureError, InvalidPlan, PlanMismatch
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload
from benchmarks.models import CASES, Case

LONGEST, MOST_ROWS = 31, 48


def main() -> int:
    """Compare every model, print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--sizes", type=int, default=10)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | symbols | equal | with payloads | differ | does not hold | from symbols s | captured s |")
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for name in options.models.split(","):
        row, problems = _compare(CASES[name], options.sizes)
        print(row, flush=True)
        for problem in problems:
            print(f"  {problem}", flush=True)
        failed += " differs" in "".join(problems)
    return 1 if failed else 0


def _compare(case: Case, count: int) -> tuple[str, list[str]]:
    example = case.batch(0)
    given = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
    names = dict(zip(given, named_dims(list(given.values())), strict=True))
    symbolic = _captured(case, example, symbolic=True)
    symbols = sorted({name for dims in names.values() for name in dims.values()})
    plan = _plan(_captured(case, example))
    chosen = random.Random(case.name)
    equal, sent, problems, from_symbols_s, captured_s = 0, 0, list[str](), 0.0, 0.0
    for _ in range(count):
        sizes = {name: 2 * chosen.randint(1, MOST_ROWS // 2) for name in symbols if name == "batch"}
        sizes |= {name: chosen.randint(2, LONGEST) for name in symbols if name != "batch"}
        start = time.perf_counter()
        try:
            expected = _costs(_captured(case, _resized(example, names, sizes)), plan)
        except AutoparError as error:
            problems.append(f"{sizes}: the model itself: {str(error).splitlines()[0]}")
            continue
        middle = time.perf_counter()
        try:
            wanted = {name: size for name, size in sizes.items() if name in symbolic.symbols}
            fixed = sizes.keys() - symbolic.symbols.keys()
            if any(_size_of(example, names, name) != sizes[name] for name in fixed):
                raise CaptureError(f"captured at one size of {sorted(fixed)}")
            found = _costs(captured_at(symbolic, wanted), plan)
        except CaptureError as error:
            problems.append(f"{sizes}: does not hold: {error}")
            continue
        captured_s, from_symbols_s = captured_s + middle - start, from_symbols_s + time.perf_counter() - middle
        wrong = [what for what, value in expected.items() if found[what] != value]
        equal += not wrong
        sent += not wrong and isinstance(expected["payloads"], list)
        problems += [f"{sizes}: {what} differs" for what in wrong]
    refused = sum("does not hold" in one for one in problems)
    differ = len({one.split(":")[0] for one in problems if one.endswith("differs")})
    known = ", ".join(sorted(symbolic.symbols)) or "none"
    row = (
        f"| {case.name} | {known} | {equal} | {sent} | {differ} | {refused} | {from_symbols_s:.1f} | {captured_s:.1f} |"
    )
    return row, problems


def _captured(case: Case, inputs: dict[str, Any], *, symbolic: bool = False) -> CapturedModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = case.build()
    given: Any = inputs
    options: dict[str, Any] = {}
    if case.loss_fn is not None:
        given = dict(inputs)
        options = {"loss_fn": case.loss_fn, "example_target": given.pop("target")}
    return normalise(capture(model, given, name=case.name, symbolic=symbolic, **options))


def _plan(captured: CapturedModel) -> Plan | None:
    for limits in ({"dp": 2, "tp": 2}, {"dp": 4}):
        try:
            constraints = Constraints(precision="fp32", pp=1, **limits)
            return search_captured(captured, make_cluster("cpu", 4, 4), constraints).plan
        except AutoparError:
            continue
    return None


def _resized(example: dict[str, Any], names: dict[str, dict[int, str]], sizes: dict[str, int]) -> dict[str, Any]:
    """The inputs repeated or cut to other sizes."""
    found = dict(example)
    for name, dims in names.items():
        for dim, symbol in dims.items():
            tensor = found[name]
            found[name] = tensor.index_select(dim, torch.arange(sizes[symbol]) % tensor.shape[dim])
    return found


def _size_of(example: dict[str, Any], names: dict[str, dict[int, str]], symbol: str) -> int:
    return next(example[name].shape[dim] for name, dims in names.items() for dim, own in dims.items() if own == symbol)


def _costs(captured: CapturedModel, plan: Plan | None) -> dict[str, Any]:
    """What a search reads of a capture, in the order of its ops."""
    workload = Workload.of(captured, "fp32")
    kept = workload.kept(AUTOPAR.memory).surely
    costs: dict[str, Any] = {
        "FLOPs": [(str(node.target), workload.rule(node).flops) for node in workload.repeats],
        "FLOPs of a step": (workload.forward_flops, workload.model_flops),
        "bytes": [(t.tensor.numel * t.tensor.itemsize, t.tensor.rows, len(t.blocks)) for t in workload.transfers],
        "kept bytes": [[(s.num_bytes, s.carries_batch) for s in own] for own in kept.values()],
    }
    costs["payloads"] = None if plan is None else _payloads(captured, plan)
    return costs


def _payloads(captured: CapturedModel, plan: Plan) -> list[Any] | str:
    """Of every record of a step, or why the plan does not fit."""
    size = plan.batch.model_copy(update={"global_size": captured.batch_size, "num_microbatches": 1})
    try:
        placed = place(Analysis.of(captured), plan.model_copy(update={"batch": size}))
    except (InvalidPlan, PlanMismatch) as error:
        return str(error)
    records = step_communication(placed)
    return [(r.cause, r.kind, r.phase, r.axes, r.payload_bytes, r.times, r.stages) for r in records]


if __name__ == "__main__":
    sys.exit(main())
