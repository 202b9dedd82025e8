"""Predicted against published: seconds a step and peak memory of training runs that others have measured.

    python benchmarks/published.py [--data DIR] [--families sc21,titan] [--rows titan-001] [--plot published.html]
                                   [--jobs 2] [--keep rows.jsonl]

Each row of ``runs.csv`` is a model of the stated shape on the stated cluster under the stated plan. The code of
``autopar estimate`` predicts it, with memory enough that nothing is refused. Where a plan is printed in part, the
fastest one that has what is printed is predicted; such rows are listed apart and count for the ranking alone. Rows that
do not state what a prediction needs are listed with what is missing. All rows take an hour of one core; ``--keep``
writes each to a file as it comes, and takes from that file those that are in it. Runs of software older than fused
attention are taken with attention spelt out.
Ranking groups are plans for one workload whose true order is known. Constants of the cost model are not fitted here
(``fit.py`` does), and nothing depends on the name of a row beyond the family it is counted in.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations, groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from benchmarks.published_models import captured_of
from benchmarks.published_predictions import for_its_memory, under_its_plan, under_the_best_plan
from benchmarks.published_rows import GIB, Missing, Row, read_rows
from benchmarks.published_software import step_time_s

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: seconds, or bytes. unprinted: what of the plan was searched for."""

    row: Row
    reported: float
    predicted: float
    unprinted: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.reported - 1


# What tables are by -> of a row.
PARTS: dict[str, Callable[[Row], str]] = {
    "family": lambda row: row.family,
    "software": lambda row: row.stack.name,
    "device": lambda row: row.gpu,
    "precision": lambda row: row.recipe or row.dtype,
    "model": lambda row: "mixture of experts" if row.experts else "dense",
    "pipeline": lambda row: "pipeline" if row.number("pp", 1) > 1 else "no pipeline",
    "context": lambda row: "context parallelism" if row.number("cp", 1) > 1 else "whole sequences",
}


def measure(cells: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Rows of one model, by their cells: of each what it reports and what is predicted, or what is missing."""
    known: dict[tuple[str, ...], CapturedModel] = {}
    found: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    for row in map(Row, cells):
        try:
            one = predict(row, known)
            found.append({"id": row.id, "reported": one.reported, "predicted": one.predicted})
            found[-1]["unprinted"] = list(one.unprinted)
        except Missing as missing:
            found.append({"id": row.id, "missing": f"does not say {missing}"})
        except AutoparError as error:
            found.append({"id": row.id, "missing": str(error).splitlines()[0]})
    return found


def measured(rows: list[Row], jobs: int, keep: Path | None) -> Iterator[dict[str, Any]]:
    """``measure`` of all rows, in several processes. keep: file of rows measured before, and to write to."""
    before = [json.loads(text) for text in keep.read_text().splitlines()] if keep and keep.is_file() else []
    known = {one["id"]: one for one in before}
    yield from (known[row.id] for row in rows if row.id in known)
    new = [row for row in rows if row.id not in known]
    groups = [[row.cells for row in group] for _, group in groupby(new, key=lambda row: row.model)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(measure, groups):
            if keep:
                with keep.open("a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in found)
            yield from found


def predict(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> Compared:
    """Raises Missing, or AutoparError where the plan cannot be."""
    reported, unprinted = row.reported(), row.unprinted
    row.constraints()  # so that what is missing is said before the model is captured
    captured = captured_of(row, known)
    if unprinted:
        found = under_the_best_plan(row, captured)
    else:
        found = for_its_memory(row, captured) if row.is_memory else under_its_plan(row, captured)
    if row.is_memory:
        predicted = float(found.predicted.peak_bytes)
    else:
        predicted = step_time_s(row, captured, found.plan, found.predicted)
    return Compared(row=row, reported=reported, predicted=predicted, unprinted=unprinted)


def line(found: Compared) -> str:
    unit, scale = ("GiB", GIB) if found.row.is_memory else ("s", 1)
    cells = (found.row.id, f"{found.reported / scale:.3g} {unit}", f"{found.predicted / scale:.3g} {unit}")
    return f"| {' | '.join(cells)} | {100 * found.error:+.1f} % |"


def summary(name: str, errors: list[float]) -> str:
    absolute = sorted(abs(error) for error in errors)
    worst = quantiles(absolute, n=10, method="inclusive")[-1] if len(absolute) > 1 else absolute[0]
    middle = median(errors)
    return f"| {name} | {len(errors)} | {100 * middle:+.1f} % | {100 * median(absolute):.1f} % | {100 * worst:.1f} % |"


def table(part: str, parts: dict[str, list[float]]) -> None:
    """The summaries of rows by ``part``, those without rows left out."""
    print(f"\n| {part} | rows | median | median of absolute | 90th percentile of absolute |\n|---|---|---|---|---|")
    for name, errors in sorted(parts.items()):
        if errors:
            print(summary(name, errors))


def ranking(path: Path, compared: dict[str, Compared]) -> tuple[int, int, list[str]]:
    """Of pairs in one group that differ by over 5 %: how many are in the right order, how many there are, the wrong."""
    groups: dict[str, list[str]] = {}
    for cells in csv.DictReader(path.open()):
        groups.setdefault(cells["group"], []).append(cells["row_id"])
    right, total, wrong = 0, 0, []
    for group, rows in groups.items():
        for a, b in combinations([compared[row] for row in rows if row in compared], 2):
            if max(a.reported, b.reported) < 1.05 * min(a.reported, b.reported):
                continue
            total += 1
            if (a.reported < b.reported) == (a.predicted < b.predicted):
                right += 1
            else:
                wrong.append(f"{group}: {a.row.id}, {b.row.id}")
    return right, total, wrong


def plot(compared: list[Compared], path: Path) -> None:
    """Predicted over reported, as a page of its own."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for family in sorted({one.row.family for one in compared}):
        own = [one for one in compared if one.row.family == family]
        figure.add_scatter(
            x=[one.reported for one in own],
            y=[one.predicted for one in own],
            text=[one.row.id for one in own],
            mode="markers",
            name=family,
        )
    ends = [min(one.reported for one in compared), max(one.reported for one in compared)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dot", "color": "grey"})
    figure.update_xaxes(type="log", title="reported seconds a step")
    figure.update_yaxes(type="log", title="predicted seconds a step")
    figure.write_html(path, include_plotlyjs=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    parser.add_argument("--rows", help="these alone")
    parser.add_argument("--plot", type=Path, help="page to write")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, help="file of predicted rows, one JSON object a line: read, and added to")
    options = parser.parse_args()
    if not (options.data / "runs.csv").is_file():
        parser.error(f"there is no {options.data / 'runs.csv'}; pass --data")
    rows = read_rows(options.data / "runs.csv")
    if options.families:
        rows = [row for row in rows if row.family in options.families.split(",")]
    if options.rows:
        rows = [row for row in rows if row.id in options.rows.split(",")]
    compared: dict[str, Compared] = {}
    left_out: list[str] = []
    by_id = {row.id: row for row in rows}
    print("| row | reported | predicted | error |\n|---|---|---|---|")
    for one in measured(rows, options.jobs, options.keep):
        if "missing" in one:
            left_out.append(f"{one['id']}: {one['missing']}")
            continue
        row, unprinted = by_id[one["id"]], tuple(one["unprinted"])
        found = Compared(row=row, reported=one["reported"], predicted=one["predicted"], unprinted=unprinted)
        compared[row.id] = found
        if not unprinted:
            print(line(found), flush=True)
    whole = {name: one for name, one in compared.items() if not one.unprinted}
    times = [one for one in whole.values() if not one.row.is_memory]
    memory = [one.error for one in whole.values() if one.row.is_memory]
    for part, of in PARTS.items():
        table(part, {name: [one.error for one in times if of(one.row) == name] for name in {of(o.row) for o in times}})
    table("all", {"step times": [one.error for one in times], "peak memory": memory})
    if len(whole) < len(compared):
        print("\nThe fastest plan that has what is printed:\n")
        print("| row | reported | predicted | error | not printed |\n|---|---|---|---|---|")
        for one in compared.values():
            if one.unprinted:
                print(line(one), f"{', '.join(one.unprinted)} |")
    for kind, rows_of_it in (("pairs of plans", whole), ("the same, with plans that are printed in part", compared)):
        right, total, wrong = ranking(options.data / "ranking_groups.csv", rows_of_it)
        print(f"\n{kind} in the right order: {right} of {total}", *(f"  wrong: {pair}" for pair in wrong), sep="\n")
    print("\nnot predicted:", *(f"  {reason}" for reason in left_out), sep="\n")
    if options.plot and times:
        plot(times, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
