"""How sure the memory prediction is: published peaks beside predicted ones, and plans that ran beside what they need.

    python benchmarks/feasibility.py [--data DIR] [--families zb,nanotron] [--peaks] [--seconds S]

Rows of ``runs.csv`` that print a peak say how far predictions are off, as logarithms of printed over predicted bytes,
by what a peak is of (allocated, reserved, nvidia-smi, or not stated): their mean and spread are what
``cost_model/memory/fit_probability.py`` states. Every row that prints its plan ran, so its plan fits: those whose
probability to fit is below a margin are what a search with that margin refuses wrongly. A row that does not print what
it recomputed may have recomputed anything: it is refused where it would not fit with full rematerialisation either (and
sequence parallelism, and a sharded optimiser, if those are not printed).
Rows of runs that were out of memory, if there are any (metric ``oom``), are those to be refused. A run that printed its
peak would have been out of memory on a device with less room than that, so peaks say how many of such are refused, by
how much less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from math import log
from pathlib import Path
from statistics import fmean, median, pstdev

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.cost_model.memory.fit_probability import DEFAULT_MARGIN, fit_probability
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from benchmarks.published_models import captured_of
from benchmarks.published_predictions import devices_of, for_its_memory
from benchmarks.published_rows import GIB, Missing, Row, read_rows

ROOT = Path(__file__).parent.parent
MARGINS = sorted({0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, DEFAULT_MARGIN})
# Shares of a printed peak by which a device is too small.
SHORT = (0.05, 0.1, 0.2, 0.3)
# Of rows whose plan as printed fits with less than this, the least that it may have needed is looked at.
CLOSE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    parser.add_argument("--peaks", action="store_true", help="rows that print a peak alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, ...], CapturedModel] = {}
    errors: dict[str, list[float]] = {}
    kinds = "recomputation printed", "not printed", "out of memory"
    fits: dict[str, list[float]] = {kind: [] for kind in kinds}
    unread: Counter[str] = Counter()
    start = time.monotonic()
    for row in read_rows(options.data / "runs.csv"):
        if options.families and row.family not in options.families.split(","):
            continue
        if options.peaks and not row.is_memory:
            continue
        if time.monotonic() - start > options.seconds:
            print(f"stopped before {row.id}")
            break
        try:
            kind, likely, text = measure(row, known, errors)
        except (Missing, AutoparError) as error:
            unread[str(error).splitlines()[0]] += 1
            continue
        fits[kind].append(likely)
        print(text, flush=True)
    for definition, found in errors.items():
        absolute = median(abs(1 / (1 + error) - 1) for error in found)
        logs = [log(1 + error) for error in found]
        print(
            f"\npeaks, {definition}, {len(found)} rows: median of absolute error {100 * absolute:.1f} %; log of "
            f"printed over predicted: mean {fmean(logs):+.3f}, standard deviation {pstdev(logs):.3f}"
        )
    every = [log(1 + error) for found in errors.values() for error in found]
    if every:
        print(f"all {len(every)}: mean {fmean(every):+.3f}, standard deviation {pstdev(every):.3f}")
    print(
        f"\n{sum(unread.values())} rows that cannot be read:",
        *(f"  {n} {why}" for why, n in unread.most_common(12)),
        sep="\n",
    )
    printed = [1 + error for found in errors.values() for error in found]
    for short in SHORT:
        fits[f"with {short:.0%} less room than the printed peak"] = [
            fit_probability(1.0, over * (1 - short)) for over in printed
        ]
    print(f"\n| margin | {' | '.join(f'{kind}: refused of {len(found)}' for kind, found in fits.items())} |")
    print("|---" * (1 + len(fits)) + "|")
    for margin in MARGINS:
        print(f"| {margin} | {' | '.join(str(sum(p < margin for p in fits[kind])) for kind in fits)} |")
    return 0


def measure(
    row: Row, known: dict[tuple[str, ...], CapturedModel], errors: dict[str, list[float]]
) -> tuple[str, float, str]:
    """Of which kind a row is, the probability that its plan fits, and a line about it. errors: by definition, to which
    the error of a printed peak is added."""
    row.constraints()
    captured = captured_of(row, known)
    predicted = for_its_memory(row, captured).predicted
    usable = devices_of(row).device.usable_bytes
    likely = fit_probability(predicted.peak_bytes, usable)
    text = f"  {row.id}: {predicted.peak_bytes / GIB:.1f} of {usable / GIB:.1f} GiB, {likely:.3f}"
    if row.is_memory:
        peak = predicted.peak_bytes
        errors.setdefault(row.definition, []).append(row.reported() / peak - 1)
        text += f", printed {row.reported() / GIB:.1f}, {100 * (peak / row.reported() - 1):+.1f} % ({row.definition})"
    if row.reported_metric == "oom":
        return "out of memory", likely, text
    if row.says_recomputation:
        return "recomputation printed", likely, text
    if likely < CLOSE:
        least = for_its_memory(row, captured, **row.sparing).predicted.peak_bytes
        likely = fit_probability(least, usable)
        text += f"; at least {least / GIB:.1f} GiB, {likely:.3f}"
    return "not printed", likely, text


if __name__ == "__main__":
    sys.exit(main())
