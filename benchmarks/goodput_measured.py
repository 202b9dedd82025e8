"""Goodput of real runs whose ranks are killed at random moments, beside that of the simulation under the same failures.

    python benchmarks/goodput_measured.py [--settings gpt-dp-tp,gpt-pp] [--turns 8] [--window 30] [--every 10]

A run goes through turns. First nothing happens to it, and its seconds a step are measured; then one rank is killed, and
the seconds to the next step are; then, for a window, ranks are killed at random moments. With the first two of a turn
the simulation of 54 days of 16,384 GPUs (``benchmarks/goodput.py``) is asked how many steps the window comes to, whose
failures it gets as they came. Goodput is the time of the steps that last over all time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.cost_model.goodput.job import Job as PlannedJob
from autopar.cost_model.goodput.job import Policy
from autopar.cost_model.goodput.protection_costs import ProtectionCosts
from autopar.cost_model.goodput.simulation import Fault, simulate_run
from benchmarks.faults import SETTINGS, make_plan, put, small_disk
from benchmarks.faulty_jobs import Job

_LIMIT_S, _DAY_S = 120.0, 86400.0
_MANY = 100_000
_ALONE, _AFTER = 30, 4


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds a step and to recover when measured, and of the window after: its kills, its steps, those simulated."""

    step_s: float
    recovery_s: float
    kills: int
    steps: int
    simulated: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="gpt-dp-tp,gpt-pp", help="of benchmarks/faults.py, on one host")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--window", type=float, default=30.0, help="seconds of a turn with failures")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between failures, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print("| setting | ms a step | s to recover | kills | steps | simulated | goodput | simulated |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.settings.split(","):
        with small_disk() as folder:
            setting = SETTINGS[name]
            job = Job(setting, make_plan(setting, folder), folder / "disk" / name, _MANY, save_every=_MANY)
            job.start()
            if not job.wait_for(3, _LIMIT_S):
                raise SystemExit(f"{name} does not start:\n{job.tail}")
            turns = [turn(job, draw, options.window, options.every) for _ in range(options.turns)]
            job.kill()
            job.forget()
        print(row(name, turns, options.window), flush=True)
    return 0


def turn(job: Job, draw: random.Random, seconds: float, every_s: float) -> Turn:
    job.wait_for(job.last + _AFTER, _LIMIT_S)
    start, first = time.monotonic(), job.last
    job.wait_for(first + _ALONE, _LIMIT_S)
    step_s = (time.monotonic() - start) / (job.last - first)
    # From the kill: what was begun of a step is lost, and one is made before the next is reported.
    recovery_s = put(job, "kill-one", draw).seconds - step_s
    job.wait_for(job.last + _AFTER, _LIMIT_S)

    start, first = time.monotonic(), job.last
    kills: list[float] = []
    at = draw.expovariate(1 / every_s)
    while at < seconds:
        time.sleep(max(0.0, start + at - time.monotonic()))
        if ranks := job.ranks():
            with suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                kills.append(time.monotonic() - start)
        at += draw.expovariate(1 / every_s)
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    steps = job.last - first
    return Turn(step_s, recovery_s, len(kills), steps, simulated(job.setting.ranks, step_s, recovery_s, kills, seconds))


def simulated(ranks: int, step_s: float, recovery_s: float, kills: list[float], seconds: float) -> int:
    """Steps that last."""
    return simulate_run(
        PlannedJob(
            step_time_s=step_s, tokens_per_step=1, num_gpus=ranks, gpus_per_node=ranks, state_bytes=0,
            checkpoint_bytes=0, data_parallel_size=2, num_microbatches=1,
        ),
        Policy(checkpoint_steps=_MANY, replica_steps=1),
        ProtectionCosts(
            checkpoint_stall_s=0, write_s=0, copy_s=0, overlaps=True, lost=0, fetch_s=0, read_s=0, detection_s=0,
            restart_s=recovery_s, replan_s=0, repair_s=0,
        ),
        [Fault(at_s=one, node=0, lost_nodes=0) for one in kills],
        days=seconds / _DAY_S,
    ).steps  # fmt: skip


def row(name: str, turns: list[Turn], window_s: float) -> str:
    """Of all windows; each turn's steps count with its own seconds a step."""
    total = window_s * len(turns)
    ran, said = (sum(one.step_s * steps for one, steps in zip(turns, many, strict=True)) / total
                 for many in ([one.steps for one in turns], [one.simulated for one in turns]))  # fmt: skip
    return (
        f"| {name} | {1000 * median(one.step_s for one in turns):.0f} | "
        f"{median(one.recovery_s for one in turns):.1f} | {sum(one.kills for one in turns)} | "
        f"{sum(one.steps for one in turns)} | {sum(one.simulated for one in turns)} | {ran:.1%} | {said:.1%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
