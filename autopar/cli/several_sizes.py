"""``search`` and ``estimate`` for several batches and lengths."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autopar.cli.json_output import print_json
from autopar.cli.outputs import check_folder, write
from autopar.cli.progress import progress_on_stderr
from autopar.ir.errors import InvalidInput
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.units import plural

if TYPE_CHECKING:
    from autopar.cli.request import Request
    from autopar.planning_sizes import SizedPlans


def run_sizes(request: Request) -> None:
    """Search a plan for every size, write those that were asked for, print a table of them. Raises AutoparError."""
    _check(request)
    check_folder(request.output)
    cluster = request.cluster()
    constraints = request.constraints(cluster)
    source = load_model_file(request.model)
    from autopar.planning_sizes import find_plans
    from autopar.report.sizes_table import print_sizes

    with progress_on_stderr(quiet=request.json) as progress:
        progress("building the model")
        found = find_plans(
            source.meta_model(),
            cluster,
            source.meta_inputs,
            request.global_batches or (None,),
            request.seqs or (None,),
            shares=request.shares or None,
            constraints=constraints,
            pin_degrees=request.pin_degrees,
            name=source.name,
            progress=progress,
        )
    lost = None if request.output is None else _saved(found, request.model, request.output)
    if request.json:
        print_json(_data(found))
    else:
        print_sizes(found)
        if request.output is not None and lost is None:
            typer.echo(f"plans written to {request.output}/")
    if lost is not None:
        raise InvalidInput(lost)
    if all(own.plan is None for own in found.found):
        raise typer.Exit(2)


def _check(request: Request) -> None:
    for flag, given in _of_one_plan(request):
        if given is not None:
            raise InvalidInput(f"{flag} is about one plan, and there are several sizes.\n  try: one size")
    if request.shares and len(request.shares) != max(1, len(request.seqs)):
        lengths = plural(max(1, len(request.seqs)), "length")
        raise InvalidInput(
            f"--shares has {plural(len(request.shares), 'share')} for {lengths} of --seq.\n  expected one for each"
        )


def _of_one_plan(request: Request) -> tuple[tuple[str, object], ...]:
    flags = ("report", "trace", "like", "lengths", "pack")
    return tuple(
        ("--pad" if flag == "pack" and request.pack is False else f"--{flag}", getattr(request, flag)) for flag in flags
    )


def _saved(found: SizedPlans, model: str, folder: Path) -> str | None:
    """Write the plans. If that fails, write them elsewhere, and say why and where."""
    try:
        _save(found, model, folder)
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="autopar-plans-"))
        write(other, lambda path: _save(found, model, path))
        return f"cannot write {folder}: {error.strerror or error}\n  the plans that were found are in {other}"
    return None


def _save(found: SizedPlans, model: str, folder: Path) -> None:
    def save(plan: Plan, length: int | None, name: str) -> None:
        named = plan.model.model_copy(update={"source": model, "seq": length})
        plan.model_copy(update={"model": named}).save(folder / f"{name}.yaml")

    for own in found.found:
        if own.plan is not None:
            save(own.plan, own.length, f"batch{own.batch}" + (f"-seq{own.length}" if own.length else ""))
    for mixed in found.mixed:
        save(mixed.plan, mixed.length, f"batch{mixed.batch}-mixture")


def _data(found: SizedPlans) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    from autopar.report.words import one_line

    def planned(plan: Plan) -> dict[str, Any]:
        assert plan.prediction is not None, "the search predicts what it returns"
        keys = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_bytes")
        return {"plan": one_line(plan), **{key: getattr(plan.prediction, key) for key in keys}}

    return {
        "capture_time_s": found.capture_time_s,
        "search_time_s": found.search_time_s,
        "captured_at_each": dict(found.fixed),
        "plans": [
            {"global_batch": own.batch, "seq": own.length, "feasible": own.plan is not None}
            | ({"reason": own.reason} if own.plan is None else planned(own.plan))
            for own in found.found
        ],
        "mixtures": [
            {
                "global_batch": mixed.batch,
                "searched_for_seq": mixed.length,
                "plan": one_line(mixed.plan),
                "step_time_s": mixed.step_time_s,
                "step_time_s_by_seq": {str(length): seconds for length, seconds in mixed.at.items()},
            }
            for mixed in found.mixed
        ],
    }
