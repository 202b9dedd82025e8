"""Published ZeRO-3 runs without a pipeline: the share of a step that their communication of parameters takes.

    python benchmarks/zero3_runs.py [--data DIR] [--rows sc21-t2-zero3-001,titan-036]

Where the search prefers ZeRO-3 to a pipeline (``picks.py``), the question is whether gathers of parameters and scatters
of gradients can hide as they are thought to. Runs that had as large a share of them, or a larger one, and the error of
their predictions, are the answer. The seconds of communication are predicted, as if nothing overlapped; the step is
the reported one. Nothing runs; no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.report.words import one_line
from autopar.search.predict.predict import Predicted
from autopar.units import seconds
from benchmarks.published_models import captured_of
from benchmarks.published_predictions import devices_of, under_its_plan
from benchmarks.published_rows import Missing, Row, read_rows
from benchmarks.published_software import gathers_in_place, in_place_s, step_time_s

ROOT = Path(__file__).parent.parent


def synchronising_s(predicted: Predicted) -> float:
    """Seconds of a step in which the parameters of a rank are gathered and its gradients scattered, before any overlap,
    of the place in the pipeline with most."""
    costs = predicted.costs
    count = costs.shape.num_microbatches
    stage_s = [
        sum((b.sync.beside + b.sync.waited).total_s(count) for b in costs.blocks[stage.first : stage.last + 1])
        for stage in costs.stages
    ]
    return max(sum(stage_s[n] for n in costs.shape.stages_of(rank)) for rank in range(costs.shape.num_ranks))


def is_asked(row: Row) -> bool:
    """Whether a row is a step time of ZeRO-3 alone or beside tensor and context parallelism, over several nodes."""
    try:
        whole = not row.is_memory and not row.unprinted and row.number("pp", 1) == 1
        return whole and row.constraints().zero == 3 and row.number("n_gpus") > devices_of(row).gpus_per_node
    except Missing:
        return False


def line(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> str:
    captured = captured_of(row, known)
    found = under_its_plan(row, captured)
    reported, plan = row.reported(), found.plan
    predicted = step_time_s(row, captured, plan, found.predicted)
    moving, shown = synchronising_s(found.predicted), found.predicted.breakdown_s.get("gradient_sync", 0.0)
    if gathers_in_place(row):
        moving = shown = in_place_s(row, captured, plan)
    hidden = 1 - shown / moving
    return (
        f"| {row.id} | {row.model} | {row.number('n_gpus')} {row.gpu} | {one_line(plan)} | {seconds(reported)} | "
        f"{moving / reported:.0%} | {hidden:.0%} | {100 * (predicted / reported - 1):+.1f} % |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--rows", help="these alone")
    options = parser.parse_args()
    if not (options.data / "runs.csv").is_file():
        parser.error(f"there is no {options.data / 'runs.csv'}; pass --data")
    torch.set_num_threads(1)
    rows = [row for row in read_rows(options.data / "runs.csv") if is_asked(row)]
    if options.rows:
        rows = [row for row in rows if row.id in options.rows.split(",")]
    known: dict[tuple[str, ...], CapturedModel] = {}
    print("| row | model | devices | plan | reported | moving parameters | hidden | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        try:
            print(line(row, known), flush=True)
        except (Missing, AutoparError) as error:
            print(f"| {row.id} | {str(error).splitlines()[0]} |", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
