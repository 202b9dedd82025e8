"""Plans for many sizes from one capture: what they cost beside one search, and whether they are as good.

    python benchmarks/plan_sizes.py [--model examples/llama3_8b.py] [--gpus 64] [--repeat 2] [--alone]

Seconds by the clock of ``autopar search`` for the last size, and for each of eight lengths and four batches, in turn.
--alone: each size is also searched for by itself, and the predicted step of its plan is printed beside that of the plan
found together with the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time

from autopar.cli.sizes import sizes_of
from autopar.cost_model.catalogue import make_cluster
from autopar.load_model import load_model_file
from autopar.planning import find_plan
from autopar.planning_sizes import find_plans
from autopar.report.words import one_line


def _command_s(options: argparse.Namespace, seq: str, batch: str) -> float:
    """Of a command, from the start of its process to its end."""
    sizes = ["--seq", seq, "--global-batch", batch, "--gpus", str(options.gpus)]
    start = time.perf_counter()
    subprocess.run(["autopar", "search", options.model, *sizes], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Parse the command line, search, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/llama3_8b.py")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--seq", default="1024,2048,3072,4096,8192,12288,16384,32768")
    parser.add_argument("--global-batch", default="128:1024")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    lengths, batches = sizes_of(options.seq, "--seq"), sizes_of(options.global_batch, "--global-batch")
    print("| one search, s | all searches, s | ratio |\n|---|---|---|")
    for _ in range(options.repeat):
        one_s = _command_s(options, str(lengths[-1]), str(batches[-1]))
        all_s = _command_s(options, options.seq, options.global_batch)
        print(f"| {one_s:.1f} | {all_s:.1f} | {all_s / one_s:.2f} |", flush=True)
    print()
    if not options.alone:
        return
    source = load_model_file(options.model)
    cluster = make_cluster("h100-sxm", options.gpus, 8)
    found = find_plans(source.meta_model(), cluster, source.meta_inputs, batches, lengths, name=source.name)
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
