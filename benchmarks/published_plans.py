"""Is the searched plan at least as fast as the published one, and why?

    python benchmarks/published_plans.py [--data DIR] [--families sc21,titan] [--every 1]

Every workload of ``shared/published/runs.csv`` is predicted under its published plan and under the plan that a free
search finds for the same model, batch, precision and devices. A device has its own memory, or as much as the published
plan is predicted to take, if that is more. Both predictions come from one cost model, so this says how good the search
is, not how good the model; ``published.py`` does that. Printed: seconds a step of both, their ratio in the closed form
and stream by stream, and what the difference is made of: the parts of the step in which the searched plan spends less,
or more, of the published step's time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.report.data import remat_level
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult
from benchmarks.published import ROOT
from benchmarks.published_models import captured_of
from benchmarks.published_predictions import devices_of, under_its_plan, workload_of
from benchmarks.published_rows import Missing, Row, read_rows

# A part of the step is named if it differs by this share of the published step.
SHOWN = 0.02

# Plans that differ by less are told apart by their streams (``Predicted.overlapped_s``), as the search does.
TIE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One workload under both plans."""

    row: Row
    published: SearchResult
    searched: SearchResult

    @property
    def ratio(self) -> float:
        return self.searched.predicted.step_time_s / self.published.predicted.step_time_s

    @property
    def streams(self) -> float:
        """The ratio with compute and communication on streams of their own."""
        return self.searched.predicted.overlapped_s / self.published.predicted.overlapped_s

    @property
    def tied(self) -> bool:
        """Longer by a hair, and no longer stream by stream."""
        return 1 < self.ratio <= 1 + TIE and self.streams <= 1

    def why(self) -> str:
        """Parts of the step that differ, as shares of the published one."""
        before, after = (_parts(one) for one in (self.published, self.searched))
        whole = self.published.predicted.step_time_s
        changes = {name: (after.get(name, 0.0) - before.get(name, 0.0)) / whole for name in {*before, *after}}
        named = sorted((share, name) for name, share in changes.items() if abs(share) >= SHOWN)
        return ", ".join(f"{name} {100 * share:+.0f} %" for share, name in named) or "nothing much"


def _parts(found: SearchResult) -> dict[str, float]:
    """Seconds of a step by part; communication of all axes together."""
    parts: dict[str, float] = {}
    for name, seconds in found.predicted.breakdown_s.items():
        name = "communication" if name.startswith("communication") else name.replace("_", " ")
        parts[name] = parts.get(name, 0.0) + seconds
    return parts


def in_words(plan: Plan) -> str:
    mesh = " ".join(f"{name}{size}" for name, size in plan.mesh.items() if size > 1)
    parts = [f"pp{plan.num_pipeline_ranks}"] if plan.num_pipeline_ranks > 1 else []
    parts += [mesh] if mesh else []
    parts += [f"zero {plan.zero}"] if plan.zero else []
    parts += [f"{plan.schedule} v{plan.virtual_stages}"] if plan.num_stages > 1 else []
    parts += [f"{plan.batch.num_microbatches} microbatches"]
    parts += [f"remat {remat_level(plan)}"] if remat_level(plan) != "none" else []
    return ", ".join(parts)


def compare(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> Pair:
    """Raises Missing, or AutoparError where the published plan cannot be."""
    row.reported()
    captured = captured_of(row, known)
    workload = workload_of(row, captured)
    published = under_its_plan(row, captured, workload)
    free = Constraints(precision=row.dtype)
    cluster = devices_of(row)
    # A little more, so that rounding does not exclude the plan itself.
    needed = int(1.001 * published.predicted.peak_bytes / free.memory_share)
    if cluster.device.usable_bytes < needed:
        cluster = cluster.with_memory(needed)
    return Pair(row=row, published=published, searched=search_captured(captured, cluster, free, workload=workload))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    parser.add_argument("--every", type=int, default=1, help="row that is compared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(options.data / "runs.csv")
    rows = [row for row in rows if not row.is_memory]
    if options.families:
        rows = [row for row in rows if row.family in options.families.split(",")]
    known: dict[tuple[str, ...], CapturedModel] = {}
    slower, tied, longer = [], [], []
    ratios = []
    print("| row | published plan | s | searched plan | s | ratio | streams | why |\n|---|---|---|---|---|---|---|---|")
    for row in rows[:: options.every]:
        try:
            pair = compare(row, known)
        except (Missing, AutoparError):
            continue
        published, searched = pair.published.predicted.step_time_s, pair.searched.predicted.step_time_s
        print(
            f"| {row.id} | {in_words(pair.published.plan)} | {published:.3g} | {in_words(pair.searched.plan)} "
            f"| {searched:.3g} | {pair.ratio:.4f} | {pair.streams:.4f} | {pair.why()} |",
            flush=True,
        )
        ratios.append(pair.ratio)
        tied += [row.id] if pair.tied else []
        longer += [f"{row.id} {100 * pair.streams - 100:.2g} %"] if pair.streams > 1 else []
        slower += [row.id] if pair.ratio > 1 and not pair.tied else []
    if ratios:
        middle = sorted(ratios)[len(ratios) // 2]
        print(f"\n{len(ratios)} workloads: ratio {min(ratios):.2f} to {max(ratios):.2f}, in the middle {middle:.2f}")
    print(f"slower by at most {100 * TIE:.1g} %, and no slower stream by stream: {', '.join(tied) or 'none'}")
    print(f"slower stream by stream: {', '.join(longer) or 'none'}")
    print(f"slower than the published plan: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
