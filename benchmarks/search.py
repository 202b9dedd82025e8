"""How long the planner takes: the whole command, from the start of the process, and the memory of it.

    python benchmarks/search.py [--cases 8b,70b] [--repeat 5]

Each case runs ``autopar search MODEL ... --json`` as a process of its own, on models and clusters of true size, with
the package's bytecode compiled before, as that of an installed package is. Prints a table in Markdown with the best of
the repeats, and exits with 1 where a limit is missed. No GPU is needed. How fast the machine is at that moment says the
last line: what a process takes that only imports what the models are made of.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from compileall import compile_dir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autopar

EXAMPLES = Path(__file__).parent.parent / "examples"
GIB = 2**30
MAX_BYTES = 3 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """limit_s: of the whole command."""

    name: str
    model: str
    gpus: int
    gpu: str
    batch: int
    seq: int
    limit_s: float

    @property
    def command(self) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name("autopar")), "search", str(EXAMPLES / self.model)),
            *("--gpus", str(self.gpus), "--gpu", self.gpu),
            *("--global-batch", str(self.batch), "--seq", str(self.seq), "--json"),
        ]


CASES = (
    Case(name="8b", model="llama3_8b.py", gpus=64, gpu="h100-sxm", batch=512, seq=8192, limit_s=6),
    Case(name="70b", model="llama3_70b.py", gpus=1024, gpu="h100-sxm", batch=2048, seq=8192, limit_s=15),
    Case(name="405b", model="llama31_405b.py", gpus=16384, gpu="h100-sxm", batch=2048, seq=8192, limit_s=30),
    Case(name="deepseek", model="deepseek_v3.py", gpus=2048, gpu="h100-sxm", batch=8192, seq=4096, limit_s=30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process: seconds from its start to its end, most bytes it held, and what it printed."""

    wall_s: float
    peak_bytes: int
    answer: dict[str, Any]


def run(case: Case) -> Run:
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(case.command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode not in (0, 2):
            raise SystemExit(f"{' '.join(case.command)}\n{errors.read()}")
        return Run(wall_s=wall_s, peak_bytes=usage.ru_maxrss * 1024, answer=json.load(out))


def imports_s() -> float:
    """Seconds of a process that imports the model code of transformers, which the commands do first."""
    start = time.perf_counter()
    code = "import gc, os; gc.disable(); import transformers.models.llama.modeling_llama; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def row(case: Case, best: Run) -> str:
    answer = best.answer
    plan = "nothing fits"
    if answer["feasible"]:
        axes = " ".join(f"{name}{size}" for name, size in answer["mesh"].items())
        plan = f"pp{answer['pp']} {axes}, zero {answer['zero']}, {answer['schedule']} v{answer['virtual_stages']}"
        plan += f", {answer['num_microbatches']} microbatches, {answer['remat']}"
    numbers = (
        f"{best.wall_s:.1f}",
        f"{case.limit_s:.0f}",
        f"{answer['capture_time_s'] or 0:.1f}",
        f"{answer['search_time_s'] or 0:.1f}",
        f"{best.peak_bytes / GIB:.2f}",
        f"{answer['step_time_s'] or 0:.2f}",
        f"{100 * (answer['optimality_gap'] or 0):.1f} %",
    )
    return f"| {case.model.removesuffix('.py')}, {case.gpus} | " + " | ".join(numbers) + f" | {plan} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the fastest counts")
    options = parser.parse_args()
    wanted = options.cases.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    package = Path(autopar.__path__[0])
    for folder in (package, *filter(Path.is_symlink, package.iterdir())):
        compile_dir(folder, quiet=1)
    print("| model, GPUs | command s | limit | capture s | search s | GiB | step s | gap | plan |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    missed = []
    for case in CASES:
        if case.name not in wanted:
            continue
        best = min((run(case) for _ in range(options.repeat)), key=lambda found: found.wall_s)
        print(row(case, best), flush=True)
        if best.wall_s > case.limit_s or best.peak_bytes > MAX_BYTES:
            missed.append(case.name)
    print(f"\nimporting torch and transformers alone: {min(imports_s() for _ in range(options.repeat)):.1f} s")
    if missed:
        print(f"\nover {MAX_BYTES / GIB:.0f} GiB or their limit of seconds: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
