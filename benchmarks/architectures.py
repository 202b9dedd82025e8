"""Architectures of many families, each under four plans on four ranks, against one process, in float32.

    python benchmarks/architectures.py [--families audio] [--models dit,gat] [--plans zero3] [--record FILE] [--again]
    python benchmarks/architectures.py --cells gcn:zero3,dit:free

Prints the table model × plan: the largest relative error of loss, gradients, parameters and buffers over two steps of
SGD with momentum; or ``refused``, with the reason; ``wrong``, above the limits in float32, and in float64 as well;
``failed``, with the last line of the traceback. The last column is the share of the FLOPs that the tensor axis of
tp2-dp2 divides. Exits with 1 if a cell is wrong or failed.

A process of its own captures each model once and searches its plans; the ranks of each cell are forked from it, so that
one that dies or hangs takes nothing along. A cell hangs if its processes spend less than half a second of CPU time in
two minutes, or more than ten minutes of CPU time: how loaded the machine is does not matter.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from architecture_models import FAMILIES
from models import Case, build
from traces import Steps, Trace, describe, in_float64, relative, train_alone, train_parallel

import autopar.api
from autopar.ir.analysis.analysis import Analysis
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.local_cluster import local_cluster
from autopar.search.divided_share import divided_flops

RANKS = 4
STEPS = Steps(sgd=2, adamw=0, compared=(0, 1))
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-4, "buffer": 1e-4}
LIMITS_IN_FLOAT64 = {"loss": 1e-6, "gradient": 1e-9, "parameter": 1e-9, "buffer": 1e-9}  # losses are told in float32
# Name of a plan -> constraints of the search; if they are refused, the next ones.
PLANS: dict[str, tuple[dict[str, Any], ...]] = {
    "free": ({},),
    "zero3": ({"dp": 4, "zero": 3},),
    "tp2-dp2": ({"tp": 2, "dp": 2},),
    # A loss over pairs of samples, or batch statistics, need the whole batch at once.
    "pp2-dp2": ({"pp": 2, "dp": 2, "num_microbatches": 2}, {"pp": 2, "dp": 2, "num_microbatches": 1}),
}
# Imported once, before the processes of models fork.
PRELOADED = (
    "transformers.modeling_utils", "transformers.generation", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "highspy",
)  # fmt: skip
IDLE_S, LEAST_CPU_S, MOST_CPU_S = 120.0, 0.5, 600.0

# refused: an error that says why, before the first step. failed: any other exception, or a process that died or hung.
Verdict = Literal["exact", "refused", "wrong", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of one model under one plan.

    text: why there is no result. errors: the largest relative ones over all ranks. chosen: the plan, in a few words.
    divided: share of the FLOPs that the tensor axis of the plan divides. commit: of the sources.
    """

    model: str
    plan: str
    verdict: Verdict
    text: str = ""
    errors: dict[str, float] | None = None
    chosen: str = ""
    divided: float | None = None
    seconds: float = 0.0
    commit: str = ""

    def __str__(self) -> str:
        errors = " ".join(f"{name} {error:.0e}" for name, error in (self.errors or {}).items())
        text = self.text.strip()
        text = text.splitlines()[-1] if self.verdict == "failed" and text else text.partition("\n")[0]
        return f"{self.model:24} {self.plan:8} {self.verdict:8} {self.seconds:5.1f} s  {errors}{text}  {self.chosen}"


def cases() -> dict[str, Case]:
    return {case.name: case for family in FAMILIES.values() for case in family}


# A process and its descendants ---------------------------------------------------------------------------------------


def watch(processes: Sequence[Any]) -> str:
    """Wait for ``processes`` and their descendants; say what was wrong if one hung, after killing all, else ""."""
    since, spent_then = time.monotonic(), 0.0
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        ended = wait(alive, timeout=5.0)
        if any(process.exitcode for process in processes):  # the others wait for a rank that has died
            break
        if ended:
            continue
        spent = sum(map(_cpu_seconds, processes))
        if spent > MOST_CPU_S:
            return _kill(processes, f"took more than {MOST_CPU_S:g} s of CPU time")
        # A descendant that has ended takes its time with it.
        if abs(spent - spent_then) > LEAST_CPU_S:
            since, spent_then = time.monotonic(), spent
        elif time.monotonic() - since > IDLE_S:
            return _kill(processes, f"hung: {LEAST_CPU_S:g} s of CPU time in {IDLE_S:g} s")
    codes = [process.exitcode for process in processes]
    return _kill(processes, f"a process ended with {codes}") if any(codes) else ""


def _cpu_seconds(process: Any) -> float:
    try:
        root = psutil.Process(process.pid)
        times = [p.cpu_times() for p in (root, *root.children(recursive=True))]
    except psutil.Error:
        return 0.0
    return sum(t.user + t.system for t in times)


def _kill(processes: Sequence[Any], reason: str) -> str:
    for process in processes:
        try:
            for descendant in psutil.Process(process.pid).children(recursive=True):
                descendant.kill()
        except psutil.Error:
            pass
        process.kill()
        process.join()
    return reason


# One model -----------------------------------------------------------------------------------------------------------


def remembered(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which forked processes need not call again where this one has."""
    results: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        at = key(*args, **kwargs)
        if at not in results:
            results[at] = function(*args, **kwargs)
        return results[at]

    return call


def remember_captures() -> None:
    """What is the same on every rank, from capture to the proof of the programs, is done before ranks fork."""
    api = autopar.api
    api.capture = remembered(
        api.capture, lambda model, *args, **kwargs: (type(model), model.training, next(model.parameters()).dtype)
    )
    api.normalise = remembered(api.normalise, lambda captured, **kwargs: id(captured))
    analyse = remembered(
        Analysis.for_plan,
        lambda captured, plan: (id(captured), plan.expert_capacity, *(str(block.recipes) for block in plan.blocks)),
    )
    api.Analysis = SimpleNamespace(for_plan=analyse)
    api.place = remembered(api.place, lambda analysis, plan: (id(analysis), plan.to_yaml()))
    api.partition = remembered(api.partition, lambda placed, outputs: (id(placed), outputs))
    api.verify_placements = remembered(api.verify_placements, lambda captured, programs, plan: id(programs))


def run_model(case: Case, plans: Sequence[str], record: str) -> None:
    """Body of the process of one model: its cells, in order, into the file ``record``."""
    commit = revision()

    def note(plan: str, verdict: Verdict, text: str, start: float, **more: Any) -> None:
        seconds = time.perf_counter() - start
        cell = Cell(model=case.name, plan=plan, verdict=verdict, text=text, seconds=seconds, commit=commit, **more)
        with open(record, "a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")

    start = time.perf_counter()
    try:
        expected = train_alone(case, STEPS)
        remember_captures()
        captured = autopar.api.normalise(
            autopar.api.capture(build(case), case.batch(0), loss_fn=case.loss_fn, example_target=None), check=False
        )
    except Exception as error:
        verdict, text = verdict_of(error)
        for plan in plans:
            note(plan, verdict, text, start)
        return
    for name in plans:
        start = time.perf_counter()
        try:
            plan = searched(captured, PLANS[name])
            placed = autopar.api.place(autopar.api.Analysis.for_plan(captured, plan), plan)
            programs = autopar.api.partition(placed, outputs="loss" if captured.has_loss else "model")
            autopar.api.verify_placements(placed.captured, programs, plan)
        except Exception as error:
            note(name, *verdict_of(error), start)
            continue
        verdict, text, errors = run_ranks(case, plan, expected)
        note(name, verdict, text, start, errors=errors, chosen=describe(plan), divided=divided_share(captured, plan))


def searched(captured: CapturedModel, constraints: Sequence[dict[str, Any]]) -> Plan:
    cluster = local_cluster(RANKS, torch.device("cpu"))
    for number, limits in enumerate(constraints, start=1):
        try:
            return autopar.api.search_captured(captured, cluster, autopar.api.constraints_of(limits)).plan
        except AutoparError:
            if number == len(constraints):
                raise
    raise AssertionError("a plan has constraints")


def verdict_of(error: Exception) -> tuple[Verdict, str]:
    if isinstance(error, AutoparError):
        return "refused", str(error)
    return "failed", "".join(traceback.format_exception(error))


def divided_share(captured: CapturedModel, plan: Plan) -> float | None:
    """Share of the FLOPs of a step that the tensor axis divides; None without such an axis."""
    return divided_flops(captured, plan, "tp").share if plan.mesh.get("tp", 1) > 1 else None


def run_ranks(case: Case, plan: Plan, expected: Trace) -> tuple[Verdict, str, dict[str, float] | None]:
    """Train ``case`` on all ranks. Where rounding in float32 may be what is seen, float64 decides."""
    verdict, text, errors = train_ranks(case, plan, expected, LIMITS)
    if verdict != "wrong":
        return verdict, text, errors
    wide = in_float64(case)
    try:
        alone = train_alone(wide, STEPS)
    except (RuntimeError, TypeError):  # there are models that cannot be run in it
        return verdict, text, errors
    verdict, text, narrower = train_ranks(wide, plan, alone, LIMITS_IN_FLOAT64)
    said = " ".join(f"{name} {error:.0e}" for name, error in (narrower or {}).items())
    return verdict, f"in float64: {said or text}", errors


def train_ranks(
    case: Case, plan: Plan, expected: Trace, limits: Mapping[str, float]
) -> tuple[Verdict, str, dict[str, float] | None]:
    with tempfile.TemporaryDirectory(prefix="autopar-cell-") as folder:
        context = get_context("fork")
        ranks = [context.Process(target=_rank, args=(rank, case, plan, expected, folder)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        ended = watch(ranks)
        files = [Path(folder, f"rank{rank}.json") for rank in range(RANKS)]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
    for verdict in ("failed", "refused"):
        for result in results:
            if result["verdict"] == verdict:
                return verdict, result["text"], None  # type: ignore[return-value]
    if ended or len(results) < RANKS:
        return "failed", ended or "a rank ended without a result", None
    errors = {name: max(result["errors"][name] for result in results) for name in limits}
    return ("exact" if all(errors[name] <= limit for name, limit in limits.items()) else "wrong"), "", errors


def _rank(rank: int, case: Case, plan: Plan, expected: Trace, folder: str) -> None:
    """Body of a rank: trains, compares, and writes its verdict or errors."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    result: dict[str, Any]
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
        trace, _ = train_parallel(case, RANKS, {"plan": plan}, STEPS)
        result = {"verdict": "exact", "errors": errors_of(trace, expected)}
        dist.barrier()  # a rank that leaves first would break collectives that others are still in
    except Exception as error:  # whatever it is, it is the cell's result
        verdict, text = verdict_of(error)
        result = {"verdict": verdict, "text": text}
    partial = Path(folder, f"rank{rank}.part")
    partial.write_text(json.dumps(result))
    partial.rename(Path(folder, f"rank{rank}.json"))
    os._exit(result["verdict"] == "failed")  # threads of a broken group may never end


def errors_of(trace: Trace, expected: Trace) -> dict[str, float]:
    pairs = zip(trace.losses, expected.losses, strict=True)
    return {
        "loss": max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs),
        "gradient": max(map(relative, trace.gradients, expected.gradients, expected.zeros)),
        "parameter": relative(trace.parameters, expected.parameters),
        "buffer": relative(trace.buffers, expected.buffers),
    }


# The table -----------------------------------------------------------------------------------------------------------


@functools.cache
def revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def run(wanted: Sequence[tuple[str, str]], record: Path) -> Iterator[Cell]:
    """Run cells model by model, add them to ``record`` and yield them."""
    context, known = get_context("fork"), cases()
    for module in PRELOADED:
        importlib.import_module(module)
    for model in dict.fromkeys(model for model, _ in wanted):
        plans = [plan for name, plan in wanted if name == model]
        with tempfile.TemporaryDirectory(prefix="autopar-model-") as folder:
            path = Path(folder, "cells.jsonl")
            process = context.Process(target=run_model, args=(known[model], plans, str(path)))
            process.start()
            ended = watch([process])
            lines = path.read_text().splitlines() if path.exists() else []
        cells = [Cell(**json.loads(line)) for line in lines]
        reason = ended or "the process of the model ended without a result"
        cells += [
            Cell(model=model, plan=plan, verdict="failed", text=reason, commit=revision())
            for plan in plans[len(cells) :]
        ]
        with record.open("a") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)
        yield from cells


def table(cells: Sequence[Cell]) -> str:
    """Models × plans in Markdown, by family, and the reasons of the cells that are not exact."""
    by_place = {(cell.model, cell.plan): cell for cell in cells}
    notes: dict[str, int] = {}
    lines = ["| model | family | " + " | ".join(PLANS) + " | divided by tp 2 |", "|---" * (len(PLANS) + 3) + "|"]
    for family, members in FAMILIES.items():
        for case in members:
            row = [by_place.get((case.name, plan)) for plan in PLANS]
            shares = [c.divided for c in row if c is not None and c.plan == "tp2-dp2" and c.divided is not None]
            if any(row):
                written = " | ".join("" if cell is None else _written(cell, notes) for cell in row)
                share = f"{shares[0]:.3f}" if shares else ""
                lines.append(f"| {case.name} | {family} | {written} | {share} |")
    return "\n".join([*lines, "", *(f"[{number}] {text}  " for text, number in notes.items())])


def _written(cell: Cell, notes: dict[str, int]) -> str:
    if cell.verdict == "exact":
        note = f" [{notes.setdefault(cell.text, len(notes) + 1)}]" if cell.text else ""
        return f"{max((cell.errors or {}).values()):.0e}{note}"
    text = " ".join(f"{name} {error:.0e}" for name, error in (cell.errors or {}).items())
    text = text or " ".join(cell.text.strip().splitlines()[-1:] if cell.verdict == "failed" else cell.text.split("\n"))
    return f"{cell.verdict} [{notes.setdefault(text, len(notes) + 1)}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="family,... instead of all")
    parser.add_argument("--models", help="model,... instead of all")
    parser.add_argument("--plans", default=",".join(PLANS), help="plan,... instead of all")
    parser.add_argument("--cells", help="model:plan,... instead")
    parser.add_argument("--record", type=Path, help="file of the cells that are done, to go on from and to add to")
    parser.add_argument("--again", action="store_true", help="run those again that are not exact in the record")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = options.models.split(",") if options.models else list(cases())
    if options.families:
        chosen = {case.name for family in options.families.split(",") for case in FAMILIES[family]}
        models = [model for model in models if model in chosen]
    wanted = [(model, plan) for model in models for plan in options.plans.split(",")]
    if options.cells:
        wanted = [(model, plan) for model, _, plan in (cell.partition(":") for cell in options.cells.split(","))]
    for model, plan in wanted:
        if model not in cases() or plan not in PLANS:
            parser.error(f"no cell {model}:{plan}; models: {', '.join(cases())}; plans: {', '.join(PLANS)}")
    with tempfile.TemporaryDirectory() as folder:
        record = options.record or Path(folder, "cells.jsonl")
        record.parent.mkdir(parents=True, exist_ok=True)
        done = {(c.model, c.plan): c for c in (Cell(**json.loads(line)) for line in _lines(record))}
        keep = {place for place, cell in done.items() if cell.verdict == "exact" or not options.again}
        for cell in run([place for place in wanted if place not in keep], record):
            done[cell.model, cell.plan] = cell
            print(cell, flush=True)
    cells = [done[place] for place in wanted]
    print("\nLargest relative error of loss, gradients, parameters and buffers over", len(STEPS), "steps\n")
    print(table(cells))
    counts = {v: sum(cell.verdict == v for cell in cells) for v in ("exact", "refused", "wrong", "failed")}
    print(f"\n{len(cells)} cells: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["wrong"] + counts["failed"] > 0)


def _lines(record: Path) -> list[str]:
    return record.read_text().splitlines() if record.exists() else []


if __name__ == "__main__":
    sys.exit(main())
