"""The inner problem by itself: how long it takes on one to three mesh axes, with and without a price on memory.

    python benchmarks/ilp.py [--model llama3_70b.py] [--meshes 64,8x8,4x4x4] [--untightened]

A memory limit is met by a price on bytes that the outer search raises until the plan fits, so the problem with a limit
is the problem without one, with other costs. For every mesh this builds and solves it without a price and at each price
that the search tries, and prints the seconds of the slowest. --untightened also solves the linear program over all
options as they come, without elimination, messages or dominance, to optimality, and compares the costs. Takes no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.search.assign.instance import Instance, value
from autopar.search.assign.solve import solve, solve_program
from autopar.search.outer.configuration import Configuration
from autopar.search.outer.configuration_solver import Solver
from autopar.search.outer.lagrangian_sweep import MULTIPLIERS
from autopar.search.outer.prices import Prices
from autopar.search.pricing.build_instance import Weights, build
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload

EXAMPLES = Path(__file__).parent.parent / "examples"
# Equal up to what linear programming leaves open.
SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One problem: seconds to build and to solve it, and the least cost in seconds of a step."""

    build_s: float
    solve_s: float
    cost: float
    instance: Instance

    @property
    def seconds(self) -> float:
        return self.build_s + self.solve_s


def timed(solver: Solver, configuration: Configuration, weights: Weights) -> Timed:
    start = time.perf_counter()
    instance = build([solver.pricing(configuration)], solver.rules([configuration]), weights).instance
    built = time.perf_counter()
    solution = solve(instance)
    solved = time.perf_counter()
    return Timed(build_s=built - start, solve_s=solved - built, cost=solution.objective, instance=instance)


def problems(solver: Solver, sizes: Sequence[int]) -> tuple[Timed, list[Timed]]:
    """Without a price on memory, and at every price of the search."""
    mesh = Mesh(tuple(MeshAxis(f"free{number}", size) for number, size in enumerate(sizes)))
    configuration = Configuration(
        num_stages=1,
        mesh=mesh,
        num_microbatches=1,
        zero=0,
        data_axes=(),
        constraints=Constraints(precision="bf16"),
    )
    plain = timed(solver, configuration, Weights(sync=0.0))
    seconds = [price * plain.cost / solver.budget_bytes for price in MULTIPLIERS]
    return plain, [timed(solver, configuration, solver.memory_weights(configuration, price)) for price in seconds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_70b.py", help="of examples/")
    parser.add_argument("--meshes", default="64,8x8,4x4x4", help="sizes of the axes")
    parser.add_argument("--untightened", action="store_true", help="compare with the whole linear program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = load_model_file(str(EXAMPLES / options.model))
    captured = normalise(capture(source.meta_model(), source.meta_inputs(512, 4096)))
    workload = Workload.of(captured, "bf16")
    print("| mesh | options | build s | solve s | at prices: slowest s | ratio | untightened s | costs |")
    print("|---|---|---|---|---|---|---|---|")
    missed = 0
    for text in options.meshes.split(","):
        sizes = [int(size) for size in text.split("x")]
        cluster = make_cluster("h100-sxm", int(torch.tensor(sizes).prod()), 8)
        solver = Solver(prices=Prices(workload, cluster), budget_bytes=0.94 * cluster.device.usable_bytes)
        # What all problems of a cluster have in common is there after the first.
        problems(solver, sizes)
        plain, priced = problems(solver, sizes)
        slowest = max(one.seconds for one in priced)
        whole, agree = "", ""
        if options.untightened:
            start = time.perf_counter()
            costs = [value(one.instance, solve_program(one.instance)[0]) for one in (plain, *priced)]
            whole = f"{time.perf_counter() - start:.2f}"
            same = all(abs(a - b.cost) <= SAME * abs(a) for a, b in zip(costs, (plain, *priced), strict=True))
            agree = "equal" if same else "differ"
            missed += not same
        print(
            f"| {text} | {max(plain.instance.num_labels)} | {plain.build_s:.3f} | {plain.solve_s:.3f} | {slowest:.3f} "
            f"| {slowest / plain.seconds:.2f} | {whole} | {agree} |",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
