"""Plans for many sizes from one capture: what they cost beside one search, and whether they are as good.

    python benchmarks/plan_sizes.py [--model examples/llama3_8b.py] [--gpus 64] [--alone]

Seconds by the clock, and of all processes, for the capture and one search at the last size, and for one capture and a
search at each of eight lengths and four batches. --alone: each size is also searched for by itself, and the predicted
step of its plan is printed beside that of the plan found together with the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from autopar.cli.sizes import sizes_of
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file
from autopar.planning import find_plan
from autopar.planning_sizes import find_plans
from autopar.report.words import one_line


def _cpu_s() -> float:
    """Of this process and of those that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    """Parse the command line, search, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/llama3_8b.py")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--seq", default="1024,2048,3072,4096,8192,12288,16384,32768")
    parser.add_argument("--global-batch", default="128:1024")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    source = load_model_file(options.model)
    cluster = make_cluster("h100-sxm", options.gpus, 8)
    lengths, batches = sizes_of(options.seq, "--seq"), sizes_of(options.global_batch, "--global-batch")
    find_plan(source.meta_model(), cluster, source.meta_inputs(batches[0], lengths[0]), name=source.name)  # warm-up

    wall, cpu = time.perf_counter(), _cpu_s()
    one = find_plan(source.meta_model(), cluster, source.meta_inputs(batches[-1], lengths[-1]), name=source.name)
    one_wall, one_cpu = time.perf_counter() - wall, _cpu_s() - cpu
    wall, cpu = time.perf_counter(), _cpu_s()
    found = find_plans(source.meta_model(), cluster, source.meta_inputs, batches, lengths, name=source.name)
    wall, cpu = time.perf_counter() - wall, _cpu_s() - cpu
    print(f"{source.name} on {options.gpus} H100\n\n| | capture s | search s | all s | CPU s |\n|---|---|---|---|---|")
    print(f"| one | {one.capture_time_s:.1f} | {one.result.search_time_s:.1f} | {one_wall:.1f} | {one_cpu:.1f} |")
    number = len(lengths) * len(batches)
    print(f"| {number} | {found.capture_time_s:.1f} | {found.search_time_s:.1f} | {wall:.1f} | {cpu:.1f} |")
    print(f"| ratio | | | {wall / one_wall:.2f} | {cpu / one_cpu:.2f} |\n")
    if not options.alone:
        return
    print("| batch | length | together s | alone s | ratio | together | alone |\n|---|---|---|---|---|---|---|")
    ratios = []
    for own in found.found:
        if own.plan is None:
            print(f"| {own.batch} | {own.length} | {own.reason.splitlines()[0]} | | | | |")
            continue
        inputs = source.meta_inputs(own.batch, own.length)
        alone = find_plan(source.meta_model(), cluster, inputs, name=source.name).plan
        assert own.plan.prediction is not None
        assert alone.prediction is not None
        times = own.plan.prediction.step_time_s, alone.prediction.step_time_s
        ratios.append(times[0] / times[1])
        plans = f"{one_line(own.plan)} | {one_line(alone)}"
        print(f"| {own.batch} | {own.length} | {times[0]:.3f} | {times[1]:.3f} | {ratios[-1]:.4f} | {plans} |")
    print(f"\nratio: {min(ratios):.4f} to {max(ratios):.4f}, mean {statistics.mean(ratios):.4f}")


if __name__ == "__main__":
    main()
