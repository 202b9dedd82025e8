"""The differences of two plans, as one JSON-ready mapping, and on a terminal.

Plans may name their mesh axes as they like, so placements are compared by what each factor is divided by:
``dp: b, tp: b`` on a mesh of 2 × 4 is ``b 8``, the same as ``data: b`` on one of 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.ir.plan import BlockPlan, Plan
from autopar.report.table import plain_table
from autopar.report.words import block_names, counted, experts_words, microbatch_size, remat_level, schedule_words
from autopar.search.on_stack import OnStack
from autopar.units import gib, percent, plural, seconds, significant

# Parts of a step that are less of the difference between two steps are not named.
_NEGLIGIBLE = 0.05

# Printed of many ops whose placement differs; the mapping has all.
_MOST_OPS = 24

_FIGURES = (
    ("step time", "step_time_s", seconds),
    ("{counted}/s/GPU", "tokens_per_s_per_gpu", significant),
    ("MFU", "mfu", percent),
    ("peak memory", "peak_memory_bytes", gib),
)


def comparison(first: Plan, second: Plan, *, on_stacks: Sequence[tuple[OnStack, OnStack]] = ()) -> dict[str, Any]:
    """Both plans' settings and figures, and where ops and stages differ.

    on_stacks: what both take on other software than they were predicted with.

    ``ops`` has those whose placement differs: factor -> what it is divided by, in each plan, None where the block is in
    the other alone. ``breakdown_s`` has seconds of a step by what they are spent on; it is empty, and figures are
    None, for plans without a prediction.
    """
    plans = first, second
    predictions = [plan.prediction for plan in plans]
    spent = [{} if p is None else p.breakdown_s for p in predictions]
    parts = list(dict.fromkeys([*spent[0], *spent[1]])) if all(spent) else []
    settings = [_settings(plan) for plan in plans]
    return {
        "same_model": first.model.fingerprint == second.model.fingerprint,
        "same_cluster": len({plan.cluster.model_copy(update={"stack": ""}) for plan in plans}) == 1,
        "stacks": [plan.cluster.stack for plan in plans],
        "on_stacks": {
            pair[0].stack: {
                "step_time_s": [own.step_time_s for own in pair],
                "peak_memory_bytes": [own.peak_memory_bytes for own in pair],
            }
            for pair in on_stacks
        },
        "counted": counted(first),
        "settings": {name: [own[name] for own in settings] for name in settings[0]},
        "figures": {key: [p and getattr(p, key) for p in predictions] for _, key, _ in _FIGURES},
        "breakdown_s": {part: [own.get(part, 0.0) for own in spent] for part in parts},
        "stages": [_stages(plan) for plan in plans],
        "ops": _ops(first, second),
    }


def in_words(found: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The difference of the steps, and what most of it is."""
    one, two = found["figures"]["step_time_s"]
    if one is None or two is None:
        without = [name for name, figure in zip(names, (one, two), strict=True) if figure is None]
        return f"no prediction in {' and '.join(without)}: written by hand, or its prediction taken out"
    if abs(two - one) < 5e-4 * one:
        return f"{names[1]} takes as long as {names[0]}"
    longer = two > one
    words = f"{names[1]} takes {seconds(abs(two - one))} ({abs(two / one - 1):.1%}) {'longer' if longer else 'less'}"
    changes = {part: own[1] - own[0] for part, own in found["breakdown_s"].items()}
    named = [
        f"{part.replace('_', ' ')} {'+' if change > 0 else '−'}{seconds(abs(change))}"
        for part, change in sorted(changes.items(), key=lambda item: -abs(item[1]))
        if abs(change) > _NEGLIGIBLE * abs(two - one)
    ]
    return words + (": " + ", ".join(named) if named else "")


def print_comparison(found: Mapping[str, Any], names: tuple[str, str], *, console: Console | None = None) -> None:
    """Prints what differs; what is equal in both plans is left out."""
    console = console or Console(highlight=False)
    console.print(Text(in_words(found, names), "bold"), soft_wrap=True)
    for key, what in (("same_model", "models"), ("same_cluster", "clusters")):
        if not found[key]:
            console.print(f"[yellow]These plans are for different {what}.[/]")
    one, two = found["stacks"]
    if one != two:
        console.print(Text(f"The first was predicted on {one}, the second on {two}.", "yellow"))
    table = plain_table("", *names, "")
    for title, key, shown in _FIGURES:
        one, two = found["figures"][key]
        if one is not None and two is not None:
            table.add_row(
                title.format(counted=found["counted"]),
                shown(one),
                shown(two),
                f"{two / one - 1:+.1%}" if one and one != two else "",
            )
    for stack, own in found["on_stacks"].items():
        for what, key, shown in (("step", "step_time_s", seconds), ("peak", "peak_memory_bytes", gib)):
            one, two = own[key]
            table.add_row(f"{what} on {stack}", shown(one), shown(two), f"{two / one - 1:+.1%}" if one != two else "")
    for part, (one, two) in found["breakdown_s"].items():
        if one or two:
            change = "" if one == two else f"{'+' if two > one else '−'}{seconds(abs(two - one))}"
            table.add_row(f"  {part.replace('_', ' ')}", seconds(one), seconds(two), change)
    for setting, (one, two) in found["settings"].items():
        if one != two:
            table.add_row(setting, one, two)
    console.print(table)
    if found["stages"][0] != found["stages"][1]:
        stages = plain_table("", *names, "")
        for number in range(max(map(len, found["stages"]))):
            cells = [own[number] if number < len(own) else "" for own in found["stages"]]
            if cells[0] != cells[1]:
                stages.add_row(f"stage {number}", *cells)
        console.print(stages)
    _print_ops(found["ops"], names, console)


def _print_ops(ops: list[dict[str, Any]], names: tuple[str, str], console: Console) -> None:
    if not ops:
        console.print(Text("every op is placed alike", "dim"))
        return
    table, block = plain_table("", *names, ""), None
    for own in ops[:_MOST_OPS]:
        if own["block"] != block:
            block = own["block"]
            table.add_row(Text(str(block), "bold"))
        table.add_row(f"  {own['op']}", *(_divided(placement) for placement in own["placements"]))
    console.print(table)
    if len(ops) > _MOST_OPS:
        console.print(Text(f"and {plural(len(ops) - _MOST_OPS, 'more op')}; --json has all", "dim"))


def _divided(placement: Mapping[str, int] | None) -> str:
    if placement is None:
        return "not there"
    return ", ".join(f"{factor} ÷ {size}" for factor, size in placement.items()) or "replicated"


def _settings(plan: Plan) -> dict[str, str]:
    """In words, each under its name."""
    levels = sorted({plan.zero_of(kind) for kind in range(len(plan.blocks))}, reverse=True)
    return {
        "ranks": f"{plan.num_ranks:,} × {plan.cluster.gpu}",
        "pipeline": f"{plan.num_pipeline_ranks}, {schedule_words(plan)}" if plan.num_stages > 1 else "none",
        "mesh": ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one rank",
        "batch": f"{plan.batch.global_size:,} samples",
        "microbatches": f"{plan.batch.num_microbatches:,} of {plural(microbatch_size(plan), 'sample')} a data rank",
        "zero": " and ".join(map(str, levels)) + (f" over {' × '.join(plan.shard_axes)}" if plan.shard_axes else ""),
        "experts": experts_words(plan).removeprefix("experts ") or "whole",
        "remat": remat_level(plan),
        "offload": plural(sum(stage.offload for stage in plan.stages), "stage"),
        "on disk": plural(sum(stage.on_disk or 0 for stage in plan.stages), "block"),
        "sequence": plan.sequence_layout,
        "precision": plan.precision_words,
        "expert capacity": "unlimited" if plan.expert_capacity is None else f"{plan.expert_capacity:g}",
    }


def _stages(plan: Plan) -> list[str]:
    names = block_names(plan)
    return [
        names[stage.first] + (f" … {names[stage.last]}" if stage.last > stage.first else "")
        + "".join(f", {level} {count}" for level, count in stage.remat.items() if count)
        for stage in plan.stages
    ]  # fmt: skip


def _ops(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """Ops that the plans place differently, in order of appearance."""
    found = []
    blocks = [{block.name: block for block in plan.blocks} for plan in (first, second)]
    for name in dict.fromkeys([*blocks[0], *blocks[1]]):
        own = [known.get(name) for known in blocks]
        for op in dict.fromkeys(op for block in own if block is not None for op in block.ops):
            placements = [_divided_by(plan, block, op) for plan, block in zip((first, second), own, strict=True)]
            if placements[0] != placements[1]:
                found.append({"block": name, "op": op, "placements": placements})
    return found


def _divided_by(plan: Plan, block: BlockPlan | None, op: str) -> dict[str, int] | None:
    """Factor -> ranks that it is divided among; None without the block."""
    if block is None:
        return None
    sizes: dict[str, int] = {}
    for axis, factor in block.ops.get(op, {}).items():
        if plan.mesh[axis] > 1:
            sizes[factor] = sizes.get(factor, 1) * plan.mesh[axis]
    return sizes
