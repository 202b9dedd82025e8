"""Goodput of real runs whose ranks are killed at random moments, beside that of the simulation under the same failures.

    python benchmarks/goodput_measured.py [--settings gpt-dp-tp,gpt-pp] [--minutes 2] [--every 15] [--seed 0]

Of each setting: the seconds of a step in a run that nothing happens to, and those from a kill to the next step, of
three kills in a run of their own. With these two the simulation of 54 days of 16,384 GPUs (``benchmarks/goodput.py``)
is asked what a third run comes to, whose failures it gets as they came. Goodput is the time of the steps that last over
all time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.cost_model.goodput.job import Job as PlannedJob
from autopar.cost_model.goodput.job import Policy
from autopar.cost_model.goodput.protection_costs import ProtectionCosts
from autopar.cost_model.goodput.simulation import Fault, simulate_run
from benchmarks.faults import SETTINGS, make_plan, put, small_disk
from benchmarks.faulty_jobs import Job, Setting

_LIMIT_S, _DAY_S = 120.0, 86400.0
_MANY = 100_000
_ALONE, _KILLS, _BETWEEN = 40, 3, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="gpt-dp-tp,gpt-pp", help="of benchmarks/faults.py, on one host")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the run with failures")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between failures, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print("| setting | ms a step | s to recover | kills | steps | simulated | goodput | simulated |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.settings.split(","):
        with small_disk() as folder:
            print(row(SETTINGS[name], folder, draw, 60 * options.minutes, options.every), flush=True)
    return 0


def row(setting: Setting, folder: Path, draw: random.Random, seconds: float, every_s: float) -> str:
    plan = make_plan(setting, folder)

    def job(name: str) -> Job:
        made = Job(setting, plan, folder / "disk" / name, _MANY, save_every=_MANY)
        made.start()
        if not made.wait_for(3, _LIMIT_S):
            raise SystemExit(f"{name} does not start:\n{made.tail}")
        return made

    alone = job("alone")
    start, first = time.monotonic(), alone.last
    alone.wait_for(first + _ALONE, _LIMIT_S)
    step_s = (time.monotonic() - start) / (alone.last - first)
    end(alone)

    killed, recoveries = job("killed"), []
    for _ in range(_KILLS):
        killed.wait_for(killed.last + _BETWEEN, _LIMIT_S)
        # From the kill: what was begun of a step is lost, and one is made before the next is reported.
        recoveries.append(put(killed, "kill-one", draw).seconds - step_s)
    end(killed)

    measured = job("measured")
    start, first = time.monotonic(), measured.last
    kills: list[float] = []
    at = draw.expovariate(1 / every_s)
    while at < seconds:
        time.sleep(max(0.0, start + at - time.monotonic()))
        if ranks := measured.ranks():
            with suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                kills.append(time.monotonic() - start)
        at += draw.expovariate(1 / every_s)
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    steps = measured.last - first
    end(measured)

    found = simulate_run(
        PlannedJob(
            step_time_s=step_s, tokens_per_step=1, num_gpus=setting.ranks, gpus_per_node=setting.ranks, state_bytes=0,
            checkpoint_bytes=0, data_parallel_size=2, num_microbatches=1,
        ),
        Policy(checkpoint_steps=_MANY, replica_steps=1),
        ProtectionCosts(
            checkpoint_stall_s=0, write_s=0, copy_s=0, overlaps=True, fetch_s=0, read_s=0, detection_s=0,
            restart_s=mean(recoveries), replan_s=0, repair_s=0,
        ),
        [Fault(at_s=one, node=0, lost_nodes=0) for one in kills],
        days=seconds / _DAY_S,
    )  # fmt: skip
    return (
        f"| {setting.name} | {1000 * step_s:.0f} | {median(recoveries):.1f} | {len(kills)} | {steps} | {found.steps} | "
        f"{100 * steps * step_s / seconds:.1f} % | {100 * found.seconds.goodput:.1f} % |"
    )


def end(job: Job) -> None:
    job.kill()
    job.forget()


if __name__ == "__main__":
    sys.exit(main())
