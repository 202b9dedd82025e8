"""The plan on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cost_model.stacks.known import AUTOPAR
from autopar.ir.plan import BlockPlan, Plan
from autopar.report.divided import divided_words
from autopar.report.drawings import drawn_mesh, drawn_timeline
from autopar.report.goodput import goodput_words
from autopar.report.lengths import in_words
from autopar.report.table import plain_table
from autopar.report.timeline import timeline_of
from autopar.report.whereabouts import SequencePlaces
from autopar.report.words import (
    block_names,
    counted,
    experts_words,
    microbatch_size,
    node_words,
    remat_level,
    schedule_words,
)
from autopar.units import gib, percent, plural, seconds, significant

if TYPE_CHECKING:
    from autopar.planning import Planned
    from autopar.search.result import Baseline

# What of a plan is printed so that it fits a screen: stages, and ops of a block.
_SCREEN_STAGES, _SCREEN_OPS = 8, 12

_AXIS_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")


def print_plan(
    plan: Plan, planned: Planned | None = None, *, console: Console | None = None, whole: bool = False
) -> None:
    """Prints what the plan does to each block, its stages, and what is predicted of it, in about a screen.

    whole: all of it, with a drawing of the mesh and of the step.
    """
    console = console or Console()
    styles = {axis: _AXIS_STYLES[n % len(_AXIS_STYLES)] for n, axis in enumerate(plan.mesh)}
    console.print(_heading(plan, styles))
    console.print(_prediction(plan, planned))
    if planned is not None:
        for found in planned.divided():
            if found.is_degenerate:
                console.print(Text(divided_words(found), "yellow"), soft_wrap=True)
    if whole and plan.num_ranks > 1:
        console.print(drawn_mesh(plan, styles))
        if (places := SequencePlaces.of(plan)) is not None:
            console.print(f"the sequence: {places.words}", soft_wrap=True)
    console.print(_stages(plan, len(plan.stages) if whole else _SCREEN_STAGES))
    timeline = timeline_of(plan) if whole and plan.num_stages > 1 else None
    if timeline is not None:
        console.print(drawn_timeline(plan, timeline, console.width))
    console.print(_blocks(plan, styles, None if whole else _SCREEN_OPS))


def _heading(plan: Plan, styles: dict[str, str]) -> RenderableType:
    cluster = plan.cluster
    software = "" if cluster.stack == AUTOPAR.name else f", predicted on {cluster.stack}"
    title = Text.assemble(
        (plan.model.name, "bold"), f" on {cluster.num_gpus} × {cluster.gpu}, {node_words(cluster)}{software}"
    )
    sizes = [Text(f"pp {plan.num_pipeline_ranks}", "bold")] if plan.num_stages > 1 else []
    sizes += [Text(f"{axis} {size}", f"bold {styles[axis]}") for axis, size in plan.mesh.items()]
    mesh = Text("mesh ") + (Text("  ").join(sizes) if sizes else Text("one rank", "bold"))
    mesh.append(
        f"   batch {plan.batch.global_size:,} = {plural(plan.batch.num_microbatches, 'microbatch', 'microbatches')}"
        f" × {plural(plan.data_parallel_size, 'data-parallel rank')} × {plural(microbatch_size(plan), 'sample')}"
    )
    flags = Text(
        f"{plan.precision_words}   {_zero(plan)}   remat {remat_level(plan)}"
        + (f"   {words}" if (words := experts_words(plan)) else "")
        + ("" if plan.sequence_layout == "contiguous" else f"   sequence {plan.sequence_layout}")
        + (f"   schedule {schedule_words(plan)}" if plan.num_stages > 1 or plan.batch.num_microbatches > 1 else "")
    )
    return Group(title, mesh, flags)


def _zero(plan: Plan) -> str:
    """Levels, the axes they shard over, how many stages are offloaded, and how many blocks to disk."""
    levels = sorted({plan.zero_of(kind) for kind in range(len(plan.blocks))}, reverse=True)
    offloaded, on_disk = sum(stage.offload for stage in plan.stages), sum(stage.on_disk or 0 for stage in plan.stages)
    return (
        f"zero {' and '.join(map(str, levels))}"
        + (f" over {' × '.join(plan.shard_axes)}" if plan.shard_axes else "")
        + (f", {plural(offloaded, 'stage')} offloaded" if offloaded else "")
        + (f", of {plural(on_disk, 'block')} to disk" if on_disk else "")
    )


def _prediction(plan: Plan, planned: Planned | None) -> RenderableType:
    prediction = plan.prediction
    if prediction is None:
        return Text("no prediction in this plan: it was written by hand", "dim")
    fits = prediction.fit_probability
    line = Text.assemble(
        "predicted ",
        (f"{seconds(prediction.step_time_s)} a step", "bold green"),
        f"   {significant(prediction.tokens_per_s_per_gpu)} {counted(plan)}/s/GPU"
        f"   {significant(prediction.model_tflops_per_gpu)} TFLOP/s/GPU"
        f"   MFU {percent(prediction.mfu)}   peak memory {gib(prediction.peak_memory_bytes)}"
        + ("" if fits is None else f", which fits with probability {fits:.2f}")
        + (f"   in host memory {gib(max(prediction.stage_host_bytes))}" if prediction.stage_host_bytes else ""),
    )
    parts: list[RenderableType] = [line]
    if prediction.offloaded_bytes is not None:
        there = ", ".join(f"{gib(size)} on {place}" for place, size in prediction.offloaded_bytes.items() if size)
        parts.append(Text(f"of the state of a rank {there.replace('on host', 'in host memory')}", "green"))
    if prediction.lengths is not None:
        parts.append(Text(in_words(prediction.lengths), "green"))
    if prediction.breakdown_s:
        total = sum(prediction.breakdown_s.values()) or 1.0
        shown = (
            f"{name.replace('_', ' ')} {seconds(s)} ({s / total:.0%})"
            for name, s in prediction.breakdown_s.items()
            if s > 0.0005 * total
        )
        parts.append(Text("of which " + ", ".join(shown), "dim"))
    if prediction.goodput is not None:
        parts.append(Text(goodput_words(prediction.goodput, counted(plan)), "dim"))
    if planned is not None:
        parts.append(
            Text(
                f"captured in {seconds(planned.capture_time_s)}, searched in {seconds(planned.result.search_time_s)}"
                f"{' until interrupted' if planned.result.interrupted else ''}, "
                f"optimality gap {percent(planned.result.optimality_gap)}, "
                f"stream by stream {seconds(planned.result.predicted.overlapped_s)}",
                "dim",
            )
        )
        if planned.result.baselines:
            step = prediction.step_time_s
            parts.append(
                Text("without a search: " + "; ".join(_baseline(b, step) for b in planned.result.baselines), "dim")
            )
    return Group(*parts)


def _baseline(baseline: Baseline, step_time_s: float) -> str:
    if baseline.step_time_s is None:
        return f"{baseline.name} does not fit"
    if baseline.at_least:
        return f"{baseline.name} {seconds(baseline.step_time_s)} or more"
    return f"{baseline.name} {seconds(baseline.step_time_s)} ({baseline.step_time_s / step_time_s - 1:+.0%})"


def _stages(plan: Plan, most: int) -> RenderableType:
    """The stages; of more than ``most``, the first ones, the last, and how many there are between."""
    names = block_names(plan)
    table = plain_table()
    for column, justify in (("stage", "right"), ("ranks", "left"), ("blocks", "left"), ("remat", "left"),
                            ("forward", "right"), ("backward", "right"), ("memory", "right")):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    size = plan.stage_mesh.size
    head = len(plan.stages) if len(plan.stages) <= most else most - 2
    for number, stage in enumerate(plan.stages):
        if head <= number < len(plan.stages) - 1:
            if number == head:
                table.add_row("…", Text(f"{len(plan.stages) - head - 1} more", "dim"), *[""] * 5)
            continue
        first, last = names[stage.first], names[stage.last]
        place = plan.pipelining.rank_of(number)
        ranks = f"{place * size}–{(place + 1) * size - 1}" if size > 1 else str(place)
        times = ["", "", ""]
        if plan.prediction is not None and number < len(plan.prediction.stage_forward_s):
            memory = plan.prediction.stage_memory_bytes
            times = [
                seconds(plan.prediction.stage_forward_s[number]),
                seconds(plan.prediction.stage_backward_s[number]),
                gib(memory[place]) if memory else "",
            ]
        remat = ", ".join(f"{level} {count}" for level, count in stage.remat.items() if count) or "none"
        table.add_row(str(number), ranks, first if first == last else f"{first} … {last}", remat, *times)
    return table


def _blocks(plan: Plan, styles: dict[str, str], most: int | None) -> RenderableType:
    """The ops of every block; of each but ``most``, if it is given."""
    table = plain_table()
    table.add_column("block")
    table.add_column("op")
    for axis in plan.mesh:
        table.add_column(f"{axis} {plan.mesh[axis]}", header_style=styles[axis])
    for block in plan.blocks:
        _add_block(table, plan, block, styles, len(block.ops) if most is None else most)
    return table


def _add_block(table: Table, plan: Plan, block: BlockPlan, styles: dict[str, str], most: int) -> None:
    title = block.name if block.repeats == 1 else f"{block.name} × {block.repeats}"
    if not block.ops:
        table.add_row(Text(title, "bold"), Text("replicated", "dim"), *("" for _ in plan.mesh))
    for number, (key, axes) in enumerate(block.ops.items()):
        if number == most:
            table.add_row("", Text(f"… {len(block.ops) - most} more", "dim"), *("" for _ in plan.mesh))
            break
        cells = [Text(axes[axis], styles[axis]) if axis in axes else Text("–", "dim") for axis in plan.mesh]
        named = Text.assemble(key, (f"  {block.recipes[key]}" if key in block.recipes else "", "dim"))
        table.add_row(Text(title if number == 0 else "", "bold"), named, *cells)
    for name, listed in block.kept.items():
        shown = list(listed if most >= len(block.ops) else listed[:most])
        more = f", … {len(listed) - len(shown)} more" if len(listed) > len(shown) else ""
        words = f"{name} keeps {', '.join(shown) or 'its inputs'}{more}"
        if host := (block.host or {}).get(name):
            shown, left = (host, 0) if most >= len(block.ops) else (host[:most], len(host[most:]))
            words += f"; in host memory: {', '.join(shown)}" + (f", … {left} more" if left else "")
        table.add_row("", Text(words, "dim"), *("" for _ in plan.mesh))
