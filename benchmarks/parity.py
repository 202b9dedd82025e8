"""Parity: ten training steps of unmodified models under many plans, against one process in float32.

    python benchmarks/parity.py [--models gpt2,llama] [--plans dp4,tp4] [--cells t5:tp4] [--full] [--resume FILE]

Prints the largest relative error of the loss of any step, of any parameter's gradient at the first and the fifth, and
of any parameter after the fifth (``traces.py`` says what the error of a tensor is), and where what the ranks send in
the second step is not what the placed model records (``issued.py``). Exits with 1 above the limits or where it is not.
Five steps are under SGD with momentum, then five under AdamW, where losses alone are compared: AdamW makes the sign of
a rounding error a step of full size. Plans in bfloat16 are held to their losses alone, within 1 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
from issued import compared
from models import CASES, Case
from traces import TEN, Trace, describe, planned, relative, train_alone, train_parallel

import autopar
from autopar.ir.errors import InfeasiblePlan
from tests.runtime.kept_plans import on_host

# Cells that one group of processes runs. Each makes process groups, whose threads live as long as the processes.
CELLS_OF_A_GROUP = 32
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-4}
NARROW_LIMITS = {"loss": 1e-2}

EXPERTS_ON_TP = autopar.constrain("*.experts.*", {"tp": Shard(0)})

# Name of a plan -> number of ranks and constraints of the search.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one remat": (1, {"remat": "full"}),
    "dp2": (2, {"dp": 2, "zero": 0}),
    "dp2 remat": (2, {"dp": 2, "zero": 0, "remat": "selective"}),
    "dp4": (4, {"dp": 4, "zero": 0}),
    "zero1": (2, {"dp": 2, "zero": 1, "num_microbatches": 2}),
    "zero2": (4, {"dp": 4, "zero": 2}),
    "zero3": (4, {"dp": 4, "zero": 3}),
    "hsdp 2x2": (4, {"dp": 4, "zero": 3, "shard": 2}),
    "tp2": (2, {"tp": 2, "sp": False}),
    "tp2 sp": (2, {"tp": 2, "sp": True}),
    "dp2 alternate": (2, {"dp": 2, "zero": 0, "remat": "alternate"}),
    "tp2 remat": (2, {"tp": 2, "sp": True, "remat": "selective"}),
    "cp2 remat": (2, {"cp": 2, "remat": "selective"}),
    "tp4": (4, {"tp": 4, "sp": False}),
    "cp2": (2, {"cp": 2}),
    "dp2 tp2": (4, {"dp": 2, "tp": 2}),
    "dp2 cp2": (4, {"dp": 2, "cp": 2}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}),
    "zero3 tp2 sp": (4, {"dp": 2, "tp": 2, "zero": 3, "sp": True}),
    "pp2 naive": (2, {"pp": 2, "schedule": "naive", "num_microbatches": 4}),
    "pp2 gpipe": (2, {"pp": 2, "schedule": "gpipe", "num_microbatches": 4}),
    "pp4 1f1b": (4, {"pp": 4, "schedule": "1f1b", "num_microbatches": 4}),
    "pp2 interleaved": (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4}),
    "pp2 zb-h1": (2, {"pp": 2, "schedule": "zb-h1", "virtual_stages": 1, "num_microbatches": 4}),
    "dp2 pp2 zb-h1": (4, {"dp": 2, "pp": 2, "schedule": "zb-h1", "zero": 2, "num_microbatches": 4}),
    "pp4 zb-2p": (4, {"pp": 4, "schedule": "zb-2p", "num_microbatches": 4}),
    "tp2 pp2 zb-v": (4, {"tp": 2, "pp": 2, "schedule": "zb-v", "num_microbatches": 4}),
    "pp2 zb-v": (2, {"pp": 2, "schedule": "zb-v", "num_microbatches": 4}),
    "pp2 dualpipe-v": (2, {"pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4}),
    "pp2 zb-h1 remat": (
        2,
        {"pp": 2, "schedule": "zb-h1", "virtual_stages": 1, "num_microbatches": 4, "remat": "full"},
    ),
    "dp2 pp2 zb-h1 remat": (
        4,
        {"dp": 2, "pp": 2, "schedule": "zb-h1", "zero": 2, "num_microbatches": 4, "remat": "selective"},
    ),
    "pp2 found": (2, {"pp": 2, "schedule": "found", "num_microbatches": 4}),
    "pp2 found v remat": (
        2,
        {"pp": 2, "schedule": "found", "virtual_stages": 2, "num_microbatches": 4, "remat": "full"},
    ),
    "zero3 pp2 found": (4, {"dp": 2, "pp": 2, "schedule": "found", "zero": 3, "num_microbatches": 4}),
    "zero3 pp2 zb-h1": (4, {"dp": 2, "pp": 2, "schedule": "zb-h1", "zero": 3, "num_microbatches": 4}),
    "zero3 pp2 zb-v remat": (
        4,
        {"dp": 2, "pp": 2, "schedule": "zb-v", "zero": 3, "num_microbatches": 4, "remat": "full"},
    ),
    "pp4 zb-2p remat": (4, {"pp": 4, "schedule": "zb-2p", "num_microbatches": 4, "remat": "alternate"}),
    "tp2 pp2 zb-v remat": (4, {"tp": 2, "pp": 2, "schedule": "zb-v", "num_microbatches": 4, "remat": "selective"}),
    "pp2 dualpipe-v remat": (2, {"pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4, "remat": "full"}),
    "tp2 pp2 dualpipe-v remat": (
        4,
        {"tp": 2, "pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4, "remat": "selective"},
    ),
    "cp2 pp2 dualpipe-v": (4, {"cp": 2, "pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4}),
    "ep2 pp2 dualpipe-v": (4, {"ep": 2, "pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4}),
    "ep2 zero2 pp2 dualpipe-v": (4, {"ep": 2, "pp": 2, "schedule": "dualpipe-v", "num_microbatches": 4, "zero": 2}),
    "dp2 pp2": (4, {"dp": 2, "pp": 2, "num_microbatches": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2, "num_microbatches": 2}),
    "cp2 pp2 zb-h1": (4, {"cp": 2, "pp": 2, "schedule": "zb-h1", "num_microbatches": 2}),
    "ep2": (2, {"ep": 2, "dp": 1, "tp": 1}),
    "tp2 experts": (2, {"tp": 2, "remat": "selective", "annotations": [EXPERTS_ON_TP]}),
    "ep2 dp2": (4, {"ep": 2, "dp": 2, "zero": 0}),
    "ep2 zero3": (4, {"ep": 2, "dp": 2, "zero": 3}),
    "ep2 zero3 all": (4, {"ep": 2, "dp": 2, "zero": 3, "shard": 4}),
    "ep2 zero1 pp2": (4, {"ep": 2, "pp": 2, "zero": 1, "num_microbatches": 2}),
    "ep2 tp2": (4, {"ep": 2, "tp": 2}),
    "ep2 pp2": (4, {"ep": 2, "pp": 2, "num_microbatches": 2}),
    "dp2 tp2 pp2": (8, {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2}),
    "dp2 cp2 pp2": (8, {"dp": 2, "cp": 2, "pp": 2, "num_microbatches": 2}),
    "ep2 tp2 pp2": (8, {"ep": 2, "tp": 2, "pp": 2, "num_microbatches": 2}),
    "ep2 cp2 pp2": (8, {"ep": 2, "cp": 2, "pp": 2, "num_microbatches": 2}),
    "free": (4, {}),
}
# Shares that the blocks of these keep at most of what autograd would save.
_KEPT: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 zero2": (2, {"dp": 2, "zero": 2}),
    "dp2 zero3": (2, {"dp": 2, "zero": 3}),
    "dp2 tp2": (4, {"dp": 2, "tp": 2, "sp": True}),
    "pp2 1f1b": (2, {"pp": 2, "schedule": "1f1b", "num_microbatches": 4}),
    "pp4 zb-h1": (4, {"pp": 4, "schedule": "zb-h1", "virtual_stages": 1, "num_microbatches": 4}),
    "pp2 zb-v": (2, {"pp": 2, "schedule": "zb-v", "num_microbatches": 4}),
    "pp2 found": (2, {"pp": 2, "schedule": "found", "num_microbatches": 4}),
}
KEPT_PLANS = {
    f"{name} {share}%": (ranks, {**constraints, "remat": share / 100})
    for name, (ranks, constraints) in _KEPT.items()
    for share in (90, 50, 25)
}
# In bfloat16, whose losses follow those of float32.
NARROW_PLANS = {
    f"{name} 50% bf16": (ranks, {**constraints, "remat": 0.5, "precision": "bf16"})
    for name, (ranks, constraints) in _KEPT.items()
}
# Parameters, gradients and optimiser state on disk.
DISK_PLANS = {
    f"{name} disk": (ranks, {**constraints, "offload": "disk", "disk": tempfile.gettempdir()})
    for name, (ranks, constraints) in _KEPT.items()
}
NARROW_PLANS |= {
    f"{name} bf16": (ranks, {**constraints, "precision": "bf16"}) for name, (ranks, constraints) in DISK_PLANS.items()
}
DISK_PLANS |= {name: plan for name, plan in NARROW_PLANS.items() if "disk" in name}
# Everything that they keep waits in host memory.
HOST_PLANS = {
    f"{name} host{end}": (ranks, {**constraints, "remat": 0.5, **precision})
    for name, (ranks, constraints) in _KEPT.items()
    for end, precision in (("", {}), (" bf16", {"precision": "bf16"}))
}
NARROW_PLANS |= {name: HOST_PLANS[name] for name in HOST_PLANS if name.endswith("bf16")}
KEPT_PLANS |= NARROW_PLANS | DISK_PLANS | HOST_PLANS
# Under schedules that split the backward, compiled.
_SPLIT = (
    *("pp2 zb-h1", "pp2 zb-v", "pp2 zb-h1 remat", "tp2 pp2 zb-v remat", "zero3 pp2 zb-v remat", "pp4 zb-2p remat"),
    "cp2 pp2 zb-h1",
)
COMPILED_PLANS = {f"{name} compiled": (PLANS[name][0], {**PLANS[name][1], "compile": True}) for name in _SPLIT}
KEPT_PLANS |= COMPILED_PLANS
PLANS |= KEPT_PLANS
# Models whose samples depend on each other (batch statistics, contrast): one microbatch is the whole batch.
COUPLED = frozenset({"clip", "resnet"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of one model under one plan: largest errors, or why the model cannot have the plan.

    unrecorded: differences between what the ranks send and what the placed model records.
    """

    model: str
    plan: str
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    chosen: str = ""
    impossible: str = ""
    failure: str = ""
    unrecorded: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        errors = {"loss": self.loss, "gradient": self.gradient, "parameter": self.parameter}
        limits = NARROW_LIMITS if self.plan in NARROW_PLANS else LIMITS
        near = all(errors[name] <= limit for name, limit in limits.items())
        return near and not self.failure and not self.unrecorded


# Plans of experts: for models that have some.
EXPERT_PLANS = frozenset(plan for plan in PLANS if "ep2" in plan or "experts" in plan)
MOE_MODELS = frozenset({"mixtral", "mixtral_aux", "qwen3_moe", "olmoe", "deepseek_v3"})
# Every model under these, and these models under every plan but some of what blocks keep: ``make parity``. --full: all
# under all.
CORE_PLANS = ("tp2 sp", "dp2 pp2", "free")
CORE_KEPT = (
    *("dp2 tp2 50%", "pp2 zb-v 50%", "dp2 zero3 disk", "pp2 zb-v disk", "dp2 zero3 host", "pp4 zb-h1 host"),
    "pp2 zb-h1 compiled",
)
CORE_MODELS = ("llama", "t5", "mixtral")


def cells_of(models: Sequence[str], plans: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs that have a meaning."""
    return [(m, p) for m in models for p in plans if m in MOE_MODELS or p not in EXPERT_PLANS]


def core_cells() -> list[tuple[str, str]]:
    plans = [plan for plan in PLANS if plan not in KEPT_PLANS or plan in CORE_KEPT]
    return list(dict.fromkeys([*cells_of(list(CASES), CORE_PLANS), *cells_of(CORE_MODELS, plans)]))


def constraints_of(case: Case, plan: str) -> dict[str, Any]:
    constraints = dict(PLANS[plan][1])
    if case.name in COUPLED:
        constraints["num_microbatches"] = 1
    return constraints


def run_cell(model: str, plan: str, references: dict[str, Trace]) -> Cell:
    case = CASES[model]
    start = time.perf_counter()
    unrecorded: list[str] = []
    try:
        ranks, constraints = PLANS[plan][0], constraints_of(case, plan)
        if plan in HOST_PLANS:
            constraints = {"plan": on_host(planned(case, ranks, constraints))}
        # What compiled code sends is not seen.
        watch = None if plan in COMPILED_PLANS else lambda parallel: compared(parallel, unrecorded)
        trace, chosen = train_parallel(case, ranks, constraints, watch=watch)
    except InfeasiblePlan as error:
        return Cell(model=model, plan=plan, impossible=str(error).splitlines()[0])
    if dist.get_rank():
        return Cell(model=model, plan=plan)  # the first rank compares
    if model not in references:
        references[model] = train_alone(case)
    expected = references[model]
    return Cell(
        model=model,
        plan=plan,
        loss=max(abs(a - b) / abs(b) for a, b in zip(trace.losses, expected.losses, strict=True)),
        gradient=max(map(relative, trace.gradients, expected.gradients, expected.zeros)),
        parameter=relative(trace.parameters, expected.parameters),
        chosen=describe(chosen),
        unrecorded=tuple(unrecorded),
        seconds=time.perf_counter() - start,
    )


def _worker(rank: int, world: int, cells: list[tuple[str, str]], folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a rank has no use for a pool of compiler processes
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    references: dict[str, Trace] = {}
    with open(f"{folder}/rank{rank}.jsonl", "w") as results:
        for model, plan in cells:
            try:
                cell = run_cell(model, plan, references)
            except Exception:  # reported in the table; the group is lost, so the run ends here
                results.write(json.dumps(asdict(Cell(model=model, plan=plan, failure=traceback.format_exc()))) + "\n")
                results.flush()
                os._exit(1)
            results.write(json.dumps(asdict(cell)) + "\n")
            results.flush()
            if rank == 0:
                _print_cell(cell)
    dist.destroy_process_group()


def revision() -> str:
    """Hash of the sources of the package and of the benchmarks."""
    found = hashlib.sha256()
    for top in (Path(autopar.__file__).parent, Path(__file__).parent):
        for folder, _, names in sorted(os.walk(top, followlinks=True)):
            for name in sorted(names):
                if name.endswith(".py"):
                    found.update(Path(folder, name).read_bytes())
    return found.hexdigest()


class Record:
    """The cells that are done, in a file that an interrupted run goes on from; failures stay failures.

    JSON lines: the ``revision`` of the sources, then a cell each. Exits if the file is of other sources.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cells: list[Cell] = []
        if path is None:
            return
        if path.exists():
            first, *rest = path.read_text().splitlines() or ["{}"]
            if json.loads(first) != {"revision": revision()}:
                sys.exit(f"{path}: cells of other sources than these.\n  try: remove it, or another --resume FILE")
            self.cells = [Cell(**json.loads(line)) for line in rest]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"revision": revision()}) + "\n")

    def add(self, cells: Sequence[Cell]) -> None:
        self.cells += cells
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)


def run(cells: Sequence[tuple[str, str]], record: Record) -> list[Cell]:
    """Run cells in groups of equal numbers of ranks; a failure ends its group and the rest goes on in a new one."""
    known = {(cell.model, cell.plan) for cell in record.cells}
    if known:
        print(f"{len(known.intersection(cells))} of {len(cells)} cells are done", flush=True)
    for world in sorted({PLANS[plan][0] for _, plan in cells}):
        waiting = [(model, plan) for model, plan in cells if PLANS[plan][0] == world and (model, plan) not in known]
        while waiting:
            left = waiting[:CELLS_OF_A_GROUP]
            with tempfile.TemporaryDirectory() as folder:
                context = mp.start_processes(_worker, args=(world, left, folder), nprocs=world, join=False)
                try:
                    while not context.join():
                        pass
                except (mp.ProcessExitedException, mp.ProcessRaisedException):
                    pass
                lines = [Path(f"{folder}/rank{r}.jsonl").read_text().splitlines() for r in range(world)]
            cells0 = [Cell(**json.loads(line)) for line in lines[0]]
            failures = [c for rows in lines for c in (Cell(**json.loads(line)) for line in rows) if c.failure]
            if failures:
                failed = failures[0]
                cells0 = [c for c in cells0 if (c.model, c.plan) != (failed.model, failed.plan)] + [failed]
                _print_cell(failed)
            elif len(cells0) < len(left):
                model, plan = left[len(cells0)]
                cells0.append(Cell(model=model, plan=plan, failure="a rank ended without a report"))
            record.add(cells0)
            waiting = waiting[len(cells0) :]
    return [cell for cell in record.cells if (cell.model, cell.plan) in set(cells)]


def _print_cell(cell: Cell) -> None:
    where = f"{cell.model:10} {cell.plan:15}"
    if cell.impossible:
        print(f"{where} cannot be: {cell.impossible}", flush=True)
    elif cell.failure:
        print(f"{where} FAILED\n{cell.failure}", flush=True)
    else:
        verdict = "ok  " if cell.passed else "OVER"
        print(
            f"{where} {verdict} loss {cell.loss:.1e}  gradient {cell.gradient:.1e}  parameter {cell.parameter:.1e}"
            f"  {cell.seconds:5.1f} s  {cell.chosen}",
            flush=True,
        )
        for text in cell.unrecorded:
            print(f"    not as recorded: {text}", flush=True)


def table(cells: Sequence[Cell]) -> str:
    """Models x plans in Markdown: gradient error of each cell, or why there is none."""
    by_place = {(c.model, c.plan): c for c in cells}
    models = list(dict.fromkeys(c.model for c in cells))
    plans = list(dict.fromkeys(c.plan for c in cells))
    notes: list[str] = []
    lines = ["| model | " + " | ".join(plans) + " |", "|---" * (len(plans) + 1) + "|"]
    for model in models:
        row = []
        for plan in plans:
            cell = by_place.get((model, plan))
            if cell is None:
                row.append("")
            elif cell.impossible:
                notes.append(f"[{len(notes) + 1}] {model}, {plan}: {cell.impossible}")
                row.append(f"[{len(notes)}]")
            elif cell.failure:
                row.append("failed")
            else:
                row.append(f"{max(cell.loss, cell.gradient, cell.parameter):.0e}" + ("" if cell.passed else " over"))
        lines.append(f"| {model} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *notes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="model,... under every plan, or those of --plans")
    parser.add_argument("--plans", help="plan,... for every model, or those of --models")
    parser.add_argument("--cells", help="model:plan,... instead")
    parser.add_argument("--full", action="store_true", help="every model under every plan: two hours on 2 cores")
    parser.add_argument("--resume", type=Path, help="file of the cells that are done, to go on from and to add to")
    options = parser.parse_args()
    if options.cells:
        pairs = [(model, plan) for model, _, plan in (cell.partition(":") for cell in options.cells.split(","))]
    elif options.models or options.plans or options.full:
        models = options.models.split(",") if options.models else list(CASES)
        pairs = cells_of(models, options.plans.split(",") if options.plans else list(PLANS))
    else:
        pairs = core_cells()
    for model, plan in pairs:
        if model not in CASES or plan not in PLANS:
            parser.error(f"no cell {model}:{plan}; models: {', '.join(CASES)}; plans: {', '.join(PLANS)}")
    cells = run(pairs, Record(options.resume))
    print("\nLargest relative error of loss, gradients and parameters over", len(TEN), "steps\n")
    print(table(cells))
    failed = [cell for cell in cells if not cell.impossible and not cell.passed]
    print(f"\n{len(cells) - len(failed)} of {len(cells)} cells within the limits {LIMITS}, in bfloat16 {NARROW_LIMITS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
