"""The command ``compare``: two plans side by side, on the software that each was predicted with and on others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.cli.check import cluster_of
from autopar.cli.json_output import print_json
from autopar.cli.plan_model import capture_for, model_of
from autopar.cli.progress import progress_on_stderr
from autopar.ir.plan import Plan


def run_compare(
    first: Path,
    second: Path,
    *,
    stacks: Sequence[str] = (),
    model: str | None = None,
    cluster_file: Path | None = None,
    json: bool = False,
) -> None:
    """Print the comparison. Plans of different stacks are predicted on both, and all on ``stacks``.

    Raises AutoparError.
    """
    from autopar.report.comparison import comparison, in_words, print_comparison
    from autopar.search.on_stack import OnStack, predict_on_stack

    files, plans = (first, second), (Plan.load(first), Plan.load(second))
    own = list(dict.fromkeys(plan.cluster.stack for plan in plans))
    wanted = list(dict.fromkeys([*(own if len(own) > 1 or stacks else []), *stacks]))
    found: list[list[OnStack]] = [[], []]
    with progress_on_stderr(quiet=json) as progress:
        for file, plan, predicted in zip(files, plans, found, strict=True):
            clusters = [cluster_of(plan, cluster_file, stack=stack) for stack in wanted]
            if clusters:
                captured = capture_for(plan, file, model_of(plan, file, model), None, progress=progress)
                predicted += [predict_on_stack(captured, cluster, plan) for cluster in clusters]
    compared = comparison(*plans, on_stacks=list(zip(*found, strict=True)))
    names = str(first), str(second)
    if json:
        print_json({"plans": names, "difference": in_words(compared, names), **compared})
    else:
        print_comparison(compared, names)
