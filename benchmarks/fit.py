"""Fits the constants of ``fitted_constants`` to published runs, and says what each of them rests on.

    python benchmarks/fit.py [--data DIR] [--rounds 2] [--families sc21,titan]

The error of a row is log(predicted / reported) of its seconds a step, its plan being the one that ``published.py``
finds. Errors are linear in the logarithms of the constants, nearly; so each round takes their derivatives and minimises

    sum over rows  huber(error)  +  sum over constants  (log(constant / prior) / width)^2 * HUBER^2

PRIOR holds what was believed before, and how firmly: rows that say nothing of a constant leave it there. Last, each
family of rows is predicted with constants that were fitted without it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.search.api import predict_plan
from benchmarks.published import ROOT
from benchmarks.published_models import captured_of
from benchmarks.published_predictions import roomy_cluster, under_its_plan, workload_of
from benchmarks.published_rows import Missing, Row, read_rows
from benchmarks.published_software import step_time_s

Floats = npt.NDArray[np.float64]

# Constant -> (believed before, by how much it may be off, as a factor).
PRIOR = {
    "sustained": (0.90, 1.10),  # training sustains less than the best of a sweep over shapes
    "half_depth": (100.0, 2.0),
    "memory": (0.80, 1.15),
    "launch_us": (4.0, 2.0),
    "hidden": (0.5, 1.3),  # pieces of the first and the last product have nothing beside them
    "early_attention": (1.0, 1.3),
    "power": (0.33, 1.5),  # power goes as the cube of the clock
}
HUBER = 0.10
STEP = 0.05


@dataclass(frozen=True, slots=True)
class Measured:
    """A row at ``fitted``: log(predicted / reported), and the derivatives by the logarithms of the constants."""

    name: str
    family: str
    error: float
    slopes: tuple[float, ...]


def measure(cells: list[dict[str, str]], fitted: Fitted, names: list[str]) -> list[Measured]:
    """Rows of one model, by their cells. names: of the constants to move."""
    known: dict[tuple[str, ...], CapturedModel] = {}
    found = []
    for row in map(Row, cells):
        try:
            reported = row.reported()
            captured = captured_of(row, known)
            workload = workload_of(row, captured)
            result = under_its_plan(row, captured, workload, fitted)
        except (Missing, AutoparError):
            continue
        error = np.log(step_time_s(row, captured, result.plan, result.predicted, fitted) / reported)
        slopes = []
        for name in names:
            moved = replace(fitted, **{name: getattr(fitted, name) * np.exp(STEP)})
            predicted = predict_plan(captured, roomy_cluster(row, moved), result.plan, workload=workload)
            step_s = step_time_s(row, captured, result.plan, predicted, moved)
            slopes.append(float(np.log(step_s / reported) - error) / STEP)
        found.append(Measured(row.id, row.family, float(error), tuple(slopes)))
        print(f"  {row.id:20} {100 * np.expm1(error):+6.1f} %", flush=True)
    return found


def measure_all(rows: list[Row], fitted: Fitted, jobs: int) -> list[Measured]:
    groups = [[row.cells for row in group] for _, group in itertools.groupby(rows, key=lambda row: row.model)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(
            itertools.chain(*pool.map(measure, groups, itertools.repeat(fitted), itertools.repeat(list(PRIOR))))
        )


def spaced(rows: list[Row], count: int) -> list[Row]:
    """At most ``count`` rows of each model of a family on a GPU, from the first to the last whose plan is printed."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        try:
            row.constraints()
            if not row.unprinted:
                groups.setdefault((row.family, row.model, row.gpu), []).append(row)
        except Missing:
            continue
    return [
        own[len(own) * number // some]
        for own in groups.values()
        for some in [min(count, len(own))]
        for number in range(some)
    ]


def solve(measured: list[Measured], now: Fitted) -> Fitted:
    """The constants that minimise the sum above, by reweighted least squares on the linear model."""
    start = np.log([getattr(now, name) for name in PRIOR])
    prior, width = (np.log([entry[part] for entry in PRIOR.values()]) for part in (0, 1))
    errors = np.array([row.error for row in measured])
    slopes = np.array([row.slopes for row in measured])
    change: Floats = np.zeros(len(PRIOR))
    for _ in range(50):
        left = errors + slopes @ change
        weight = 1 / np.maximum(1.0, np.abs(left) / HUBER)
        matrix = (slopes * weight[:, None]).T @ slopes + np.diag((HUBER / width) ** 2)
        pull = (slopes * weight[:, None]).T @ errors + (HUBER / width) ** 2 * (start - prior)
        change = -np.linalg.solve(matrix, pull)
    return replace(now, **dict(zip(PRIOR, map(float, np.exp(start + change)), strict=True)))


def predicted(measured: list[Measured], now: Fitted, then: Fitted) -> Floats:
    """Errors with other constants, by the linear model, as fractions."""
    change = np.array([np.log(getattr(then, name) / getattr(now, name)) for name in PRIOR])
    errors: Floats = np.expm1([row.error + float(np.dot(row.slopes, change)) for row in measured])
    return errors


def split(measured: list[Measured], family: str) -> tuple[list[Measured], list[Measured]]:
    """The rows of a family, and the others."""
    return [row for row in measured if row.family == family], [row for row in measured if row.family != family]


def summary(errors: Floats) -> str:
    size = np.abs(errors)
    return (
        f"{len(errors):3} rows, median {100 * np.median(errors):+.1f} %, of absolute {100 * np.median(size):.1f} %, "
        f"90th percentile {100 * np.quantile(size, 0.9):.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    parser.add_argument("--constants", help="these alone; the others stay as they are")
    parser.add_argument(
        "--of-model", type=int, help="at most so many rows of each model of a family, as they are alike"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, help="write what was measured to this file, as JSON")
    options = parser.parse_args()
    rows = read_rows(options.data / "runs.csv")
    rows = [row for row in rows if not row.is_memory]
    if options.constants:
        for name in PRIOR.keys() - set(options.constants.split(",")):
            del PRIOR[name]
    if options.families:
        rows = [row for row in rows if row.family in options.families.split(",")]
    if options.of_model:
        rows = spaced(rows, options.of_model)
    now = FITTED
    for number in range(options.rounds):
        print(f"round {number + 1}")
        measured = measure_all(rows, now, options.jobs)
        if options.keep:
            options.keep.write_text(json.dumps([asdict(now), [asdict(row) for row in measured]]))
        then = solve(measured, now)
        print(f"at the constants so far: {summary(predicted(measured, now, now))}")
        for name in PRIOR:
            value = getattr(then, name)
            print(f"  {name:20} {getattr(now, name):8.4g} -> {value:8.4g}   (prior {PRIOR[name][0]:g})")
        print(f"with these, nearly: {summary(predicted(measured, now, then))}")
        for family in sorted({row.family for row in measured}):
            own, others = split(measured, family)
            print(f"  {family:8} {summary(predicted(own, now, then))}")
            if others:
                print(f"  {'':8} {summary(predicted(own, now, solve(others, now)))}, fitted without it")
        if number + 1 < options.rounds:
            now = then
    by_others = [
        predicted(own, now, solve(others, now))
        for own, others in (split(measured, family) for family in sorted({row.family for row in measured}))
        if others
    ]
    if by_others:
        print(f"each family by the others: {summary(np.concatenate(by_others))}")


if __name__ == "__main__":
    main()
