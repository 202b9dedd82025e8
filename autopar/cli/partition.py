"""The command ``partition``: the program of one rank under a plan."""

from __future__ import annotations

from pathlib import Path

from autopar.cli.progress import progress_on_stderr
from autopar.ir.errors import InvalidInput
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.load_model import load_model_file


def run_partition(
    model: str, plan_file: Path, *, rank: int = 0, print_after: str | None = None, seq: int | None = None
) -> str:
    """The text of the program of ``rank``: of its stages, or after the pass ``print_after``. Raises AutoparError.

    A pass of normalisation knows no ranks; after it there is the whole model, on global shapes.
    """
    plan = Plan.load(plan_file)
    if not 0 <= rank < plan.num_ranks:
        raise InvalidInput(f"--rank {rank}: the plan has {plan.num_ranks} ranks, 0 to {plan.num_ranks - 1}")
    stages = plan.pipelining.stages_of(rank // plan.stage_mesh.size)
    source = load_model_file(model)
    # Imported here so that a mistyped file is answered at once.
    from autopar.ir.capture.capture import capture
    from autopar.ir.placed.placed_model import place_captured
    from autopar.passes.insert_redistributions import NAME
    from autopar.passes.normalise import normal_form, normalise
    from autopar.passes.partition import PASSES, partition
    from autopar.passes.placed_program import PlacedProgram
    from autopar.passes.printing import captured_text, program_text

    names = dict.fromkeys((*(step.name for step in normal_form()), NAME, *(step.name for step in PASSES)))
    if print_after is not None and print_after not in names:
        raise InvalidInput(f"--print-after {print_after}: there is no such pass.\n  the passes: {', '.join(names)}")
    blocks = {block for stage in stages for block in range(plan.stages[stage].first, plan.stages[stage].last + 1)}
    found: list[str] = []

    def after_rewrite(name: str, captured: CapturedModel) -> None:
        if name == print_after:
            found.append(captured_text(captured))

    def after(name: str, program: PlacedProgram) -> None:
        if name == print_after:
            found.append(program_text(program, {-1, *blocks}))

    with progress_on_stderr(quiet=False) as progress:
        progress("capturing the model")
        inputs = source.meta_inputs(plan.planned_rows, seq)
        captured = normalise(capture(source.meta_model(), inputs, name=source.name), after=after_rewrite)
        if found:
            return found[-1]
        progress("partitioning")
        placed = place_captured(captured, plan)
        programs = partition(placed, outputs="loss" if captured.has_loss else "model", after=after)
    return found[0] if found else "\n\n".join(_stage_text(programs[stage]) for stage in stages)


def _stage_text(program: StageProgram) -> str:
    """The blocks of a stage, each as a function from named values to named values."""
    from autopar.passes.printing import node_text

    parts = [f"stage {program.stage} of {program.num_stages} on {program.mesh}"]
    for block in (*program.totals, *program.blocks):
        lines = [f"{block.name}({', '.join(block.inputs)}) -> ({', '.join(block.outputs)})"]
        lines += [f"  {node_text(node, program.mesh)}" for node in call_nodes(block.graph)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
