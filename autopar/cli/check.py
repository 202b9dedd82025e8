"""The command ``check``: a plan executed without its devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from autopar.cli.json_output import print_json
from autopar.cli.progress import progress_on_stderr
from autopar.cli.request import read_yaml
from autopar.cost_model.catalogue import catalogued_cluster
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.errors import InvalidInput, PlanMismatch
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.report.table import plain_table
from autopar.units import gib

if TYPE_CHECKING:
    from autopar.checking.check import Checked, CheckedRank


def run_check(
    model: str,
    plan_file: Path,
    *,
    seq: int | None = None,
    ranks: str | None = None,
    cluster_file: Path | None = None,
    json: bool = False,
) -> bool:
    """Check a plan and print what was found; whether there is nothing wrong. Raises AutoparError."""
    plan = Plan.load(plan_file)
    cluster = cluster_of(plan, cluster_file)
    chosen = _numbers(ranks)
    source = load_model_file(model)
    # Imported here so that a mistyped file is answered at once.
    from autopar.checking.check import check_plan
    from autopar.ir.capture.capture import capture
    from autopar.passes.normalise import normalise

    with progress_on_stderr(quiet=json) as progress:
        progress("capturing the model")
        inputs = source.meta_inputs(plan.planned_rows, seq)
        captured = normalise(capture(source.meta_model(), inputs, name=source.name))
        checked = check_plan(source.build, captured, plan, cluster, ranks=chosen, progress=progress)
    if json:
        print_json(_summary(checked))
    else:
        _print(checked, plan)
    return not checked.problems


def _summary(checked: Checked) -> dict[str, Any]:
    """The object that ``--json`` prints. Bytes are those of tensors, at the peak of a step."""
    return {
        "agree_and_fit": not checked.problems,
        "problems": list(checked.problems),
        "proved_ranks": _num_proved(checked),
        "budget_bytes": checked.budget_bytes,
        "ranks": [
            {
                "rank": own.trace.rank,
                "stages": list(own.stages),
                "num_communications": len(own.trace.communications),
                "peak_bytes": own.peak_bytes,
                "predicted_bytes": _predicted_bytes(own),
                "between_steps_bytes": own.trace.persistent_bytes,
            }
            for own in checked.ranks
        ],
    }


def _num_proved(checked: Checked) -> int:
    """Ranks whose programs are proved to compute the loss and the gradients of the model."""
    return sum(len(own.ranks) for own in checked.proved if own.problem is None)


def _predicted_bytes(own: CheckedRank) -> float:
    """What the allocator loses is no part of what tensors hold."""
    return own.predicted.total - own.predicted.workspace


def _print(checked: Checked, plan: Plan) -> None:
    console = Console(highlight=False)
    columns = "rank", "stages", "communications a step", "peak memory", "predicted", "between steps"
    table = plain_table(*columns, right=True)
    for own in checked.ranks:
        predicted = _predicted_bytes(own)
        table.add_row(
            str(own.trace.rank),
            ", ".join(map(str, own.stages)),
            f"{len(own.trace.communications):,}",
            gib(own.peak_bytes),
            f"{gib(predicted)} ({predicted / own.peak_bytes - 1:+.0%})",
            gib(own.trace.persistent_bytes),
        )
    console.print(table)
    stages = f"{plan.num_stages} stages" if plan.num_stages > 1 else "one stage"
    console.print(
        f"proved: the programs of {_num_proved(checked):,} of {plan.num_ranks:,} ranks ({stages}) compute the loss and "
        "every gradient of the model",
        soft_wrap=True,
    )
    for problem in checked.problems:
        console.print(f"[bold red]problem[/]: {escape(problem)}", soft_wrap=True)
    if not checked.problems:
        words = f"the {len(checked.ranks)} ranks that were run agree, and fit into {gib(checked.budget_bytes)}"
        console.print(f"[green]{words}[/]; the other {plan.num_ranks - len(checked.ranks):,} run the same programs")


def cluster_of(plan: Plan, path: Path | None, *, stack: str | None = None) -> Cluster:
    """The cluster that a plan was made for, or the one of a file; with another software ``stack``, if one is given.

    Raises PlanMismatch, InvalidCluster.
    """
    if path is None:
        if plan.num_ranks > plan.cluster.num_gpus:
            raise PlanMismatch(f"the plan has {plan.num_ranks:,} ranks, its cluster {plan.cluster.num_gpus:,} GPUs")
        return catalogued_cluster(plan.cluster.model_copy(update={"stack": stack or plan.cluster.stack}))
    described = read_yaml(path)
    if stack is not None and isinstance(described, dict):
        described = {**described, "stack": stack}
    cluster = cluster_from_dict(described, source=str(path))
    if cluster.num_gpus != plan.num_ranks:
        raise PlanMismatch(f"the plan is for {plan.num_ranks} ranks, {path} has {cluster.num_gpus} GPUs")
    return cluster


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise InvalidInput(f"--ranks {text!r}: expected numbers, as in 0,7,1023") from None
