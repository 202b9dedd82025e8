"""How sure the memory prediction is: published peaks beside predicted ones, and plans that ran beside what they need.

    python benchmarks/feasibility.py [--data DIR] [--families zb,nanotron]

Rows of ``runs.csv`` that print a peak say how far predictions are off, as logarithms of printed over predicted bytes:
their mean and spread are what ``cost_model/memory/fit_probability.py`` states. Every row that prints its plan ran, so
its plan fits: those whose probability to fit is below a margin are what a search with that margin refuses wrongly. Rows
of runs that were out of memory, if there are any (metric ``oom``), are those to be refused.
"""

from __future__ import annotations

import argparse
import csv
import sys
from math import log
from pathlib import Path
from statistics import fmean, median, pstdev

import torch
from published_models import captured_of
from published_rows import Missing, Row

from autopar.cost_model.memory.fit_probability import fit_probability
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel

ROOT = Path(__file__).parent.parent
MARGINS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, ...], CapturedModel] = {}
    errors: list[float] = []
    fits: dict[bool, list[float]] = {True: [], False: []}
    for cells in csv.DictReader((options.data / "runs.csv").open()):
        row = Row(cells)
        if options.families and row.family not in options.families.split(","):
            continue
        ran = row.reported_metric != "oom"
        try:
            row.constraints()
            peak = row.under_its_plan(captured_of(row, known)).predicted.peak_bytes
            usable = row.devices().device.usable_bytes
            if row.is_memory:
                errors.append(log(row.reported() / peak))
        except (Missing, AutoparError):
            continue
        fits[ran].append(fit_probability(peak, usable))
        text = f"  {row.id}: {peak / 2**30:.1f} of {usable / 2**30:.1f} GiB, {fits[ran][-1]:.3f}"
        print(text + (f", printed {row.reported() / 2**30:.1f}" if row.is_memory else ""), flush=True)
    if errors:
        print(
            f"\nlog of printed over predicted peak, {len(errors)} rows: mean {fmean(errors):+.3f}, median "
            f"{median(errors):+.3f}, standard deviation {pstdev(errors):.3f}"
        )
    print(f"\n| margin | refused of {len(fits[True])} that ran | refused of {len(fits[False])} out of memory |")
    print("|---|---|---|")
    for margin in MARGINS:
        shares = [f"{sum(p < margin for p in own)}" for own in (fits[True], fits[False])]
        print(f"| {margin} | {' | '.join(shares)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
