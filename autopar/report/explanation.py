"""The communications of a plan, and the reasons for an op's placement, on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import LengthsPrediction, Plan
from autopar.report.comparison import comparison, in_words
from autopar.report.divided import divided_data
from autopar.report.lengths import in_words as lengths_in_words
from autopar.report.table import plain_table
from autopar.report.whereabouts import SequencePlaces, held_at_peak
from autopar.search.api import priced_plan
from autopar.search.divided_share import divided_by_axes
from autopar.search.explanation import Alternative, Explanation
from autopar.search.predict.communications import Communication, communications
from autopar.units import gib, percent, seconds

# Of the communications of a plan, those that together are so much of its time are printed.
_MOST = 0.98

# Shares of memory from which it is said to bind.
_TIGHT = 0.9


def overview(captured: CapturedModel, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """Every communication of a plan, those that take longest first; where its sequence lies, and what its memory holds.

    ``times``: how often it is there in a step, over all blocks and microbatches. ``num_bytes``: of a microbatch on one
    rank. ``step_s``: seconds that all of them take on a rank that has every block, waits for other ranks not counted.
    """
    pricing, assignment, _ = priced_plan(captured, cluster, plan)
    found = []
    for own in communications(pricing, assignment):
        times = own.repeats * plan.batch.num_microbatches
        found.append({**_described(own), "times": times, "step_s": times * own.time.total_s})
    found.sort(key=lambda one: -float(one["step_s"]))
    return {
        "step_time_s": None if plan.prediction is None else plan.prediction.step_time_s,
        "breakdown_s": {} if plan.prediction is None else plan.prediction.breakdown_s,
        "lengths": None
        if plan.prediction is None or plan.prediction.lengths is None
        else plan.prediction.lengths.model_dump(),
        "divided": divided_data(divided_by_axes(captured, plan, workload=pricing.workload)),
        "communications": found,
        "sequence": None if (places := SequencePlaces.of(plan)) is None else places.words,
        "held": [asdict(one) for one in held_at_peak(plan, pricing, assignment)],
    }


def print_overview(found: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints where the step's time goes, what is where, and what is communicated for it."""
    console = console or Console(highlight=False)
    if found["breakdown_s"]:
        total = found["step_time_s"]
        spent = (
            f"{part.replace('_', ' ')} {seconds(s)} ({s / total:.0%})" for part, s in found["breakdown_s"].items() if s
        )
        console.print(Text(f"{seconds(total)} a step: " + ", ".join(spent)), soft_wrap=True)
    if found["lengths"] is not None:
        console.print(Text(lengths_in_words(LengthsPrediction(**found["lengths"]))), soft_wrap=True)
    for axis in found["divided"].values():
        console.print(axis["words"], soft_wrap=True)
    if found["sequence"]:
        console.print(f"the sequence: {found['sequence']}", soft_wrap=True)
    if found["held"]:
        memory = plain_table("of the fullest rank", "memory")
        for one in found["held"]:
            memory.add_row(Text(f"  {one['what']}", "dim") if one["inside"] else one["what"], gib(one["num_bytes"]))
        console.print(memory)
    if not found["communications"]:
        console.print("no op communicates with another rank")
        return
    table = plain_table("forward", "backward", "over", "of", "for", "size", "one", "times", "a step")
    whole, shown = sum(one["step_s"] for one in found["communications"]), 0.0
    for number, one in enumerate(found["communications"]):
        if number and shown >= _MOST * whole:
            rest = len(found["communications"]) - number
            table.add_row(Text(f"and {rest} more", "dim"), *[""] * 7, seconds(whole - shown))
            break
        shown += one["step_s"]
        table.add_row(
            one["forward"] or "–", one["backward"] or "–", one["axis"], one["tensor"], _few(one["users"]),
            _size(one["num_bytes"]), seconds(one["forward_s"] + one["backward_s"]), f"{one['times']:,}",
            seconds(one["step_s"]),
        )  # fmt: skip
    console.print(table)
    console.print(Text("autopar explain PLAN OP says why an op is placed as it is", "dim"))


def described(found: Explanation) -> dict[str, Any]:
    """An explanation, as one JSON-ready mapping."""
    return {
        "block": found.block,
        "op": found.op,
        "repeats": _repeats(found),
        "placement": [list(one) for one in found.placement],
        "recipe": found.recipe,
        "followers": list(found.followers),
        "factors": list(found.factors),
        "excluded": [{"axis": one.axis, "factor": one.factor, "reason": one.reason} for one in found.excluded],
        "forward_s": found.time.forward_s,
        "backward_s": found.time.backward_s,
        "communications": [_described(own) for own in found.communications],
        "step_time_s": _step_s(found.plan),
        "peak_share": found.peak_share,
        "alternatives": [
            {
                "placement": [list(one) for one in other.placement],
                "step_time_s": None if other.prediction is None else other.prediction.step_time_s,
                "reason": other.reason,
                "faster_with_network_times": other.faster_with,
                "plan": None if other.plan is None else other.plan.model_dump(mode="json", exclude_none=True),
            }
            for other in found.alternatives
        ],
    }


def print_explanation(found: Explanation, like: Sequence[str], *, console: Console | None = None) -> None:
    """Prints one explanation. like: the command that searches around the plan, to which the placement is added."""
    console = console or Console(highlight=False)
    plan, repeats = found.plan, _repeats(found)
    title = Text.assemble((found.op, "bold"), f" in {found.block}" + (f" × {repeats}" if repeats > 1 else ""))
    console.print(title + Text(f": {_words(plan, found.placement)}"))
    console.print(
        f"{seconds(found.time.forward_s)} forward, {seconds(found.time.backward_s)} backward of a microbatch on a rank"
        + (f", with {_few(found.followers)}, placed as it is" if found.followers else ""),
        soft_wrap=True,
    )
    recipe = found.recipe or (f"{plan.precision}: {found.kept_wide}" if found.kept_wide else None)
    if recipe is not None:
        console.print(f"computed in {recipe}", soft_wrap=True)
    console.print(f"it can be divided along {', '.join(found.factors) or 'nothing'}", soft_wrap=True)
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in found.excluded:
        reasons.setdefault((one.axis, one.reason), []).append(one.factor)
    for (axis, reason), factors in reasons.items():
        console.print(f"not along {', '.join(factors)} over {axis}: {reason}", soft_wrap=True)
    if found.peak_share > _TIGHT:
        console.print(f"memory binds: the plan takes {percent(found.peak_share)} of what it may", soft_wrap=True)
    if found.communications:
        table = plain_table("forward", "backward", "over", "of", "for", "size", "forward", "backward")
        for own in found.communications:
            table.add_row(
                own.forward or "–", own.backward or "–", own.axis, own.tensor, _few(own.users), _size(own.num_bytes),
                seconds(own.time.forward_s) if own.time.forward_s else "–",
                seconds(own.time.backward_s) if own.time.backward_s else "–",
            )  # fmt: skip
        console.print(table)
    else:
        console.print("nothing is communicated for it")
    _print_alternatives(found, console)
    placement = " ".join(f"{axis}={factor or '*'}" for axis, factor in found.placement)
    command = shlex.join([*like, "--forbid", f"{found.block}/{found.op}: {placement}"])
    console.print(Text(f"what is found without this placement: {command}", "dim"), soft_wrap=True)


def _print_alternatives(found: Explanation, console: Console) -> None:
    plan, step = found.plan, _step_s(found.plan)
    table = plain_table("placement", "step", "", "peak memory", "would be faster with")
    assert plan.prediction is not None
    memory = gib(plan.prediction.peak_memory_bytes)
    table.add_row(Text(_words(plan, found.placement), "bold"), seconds(step), "", memory, "")
    for other in found.alternatives:
        prediction = other.prediction
        if prediction is None:
            table.add_row("any other", "none", "", "", other.reason.splitlines()[0])
            continue
        change = f"{prediction.step_time_s / step - 1:+.1%}"
        table.add_row(
            _words(plan, other.placement), seconds(prediction.step_time_s), change,
            gib(prediction.peak_memory_bytes), _faster_with(other),
        )  # fmt: skip
    console.print(table)
    second = found.alternatives[0].plan
    if second is not None:
        pair = comparison(plan, second)
        changed = [own["op"] for own in pair["ops"] if own["op"] != found.op]
        words = in_words(pair, ("the plan", "the second"))
        console.print(
            Text(words + (f"; it also places {_few(changed)} otherwise" if changed else ""), "dim"), soft_wrap=True
        )


def _faster_with(other: Alternative) -> str:
    speed = other.faster_with
    if speed is None:
        return "no network from an eighth to 8 × as fast"
    return f"a network {speed:g} × as fast" if speed > 1 else f"a network {1 / speed:g} × slower"


def _described(own: Communication) -> dict[str, Any]:
    return {
        "tensor": own.tensor,
        "users": list(own.users),
        "axis": own.axis,
        "forward": own.forward,
        "backward": own.backward,
        "num_bytes": own.num_bytes,
        "forward_s": own.time.forward_s,
        "backward_s": own.time.backward_s,
    }


def _repeats(found: Explanation) -> int:
    """Of the op's block."""
    return next(block.repeats for block in found.plan.blocks if block.name == found.block)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None, "an explanation predicts its plan"
    return plan.prediction.step_time_s


def _size(num_bytes: float | None) -> str:
    return "–" if num_bytes is None else gib(num_bytes)


def _words(plan: Plan, placement: Iterable[tuple[str, str | None]]) -> str:
    return ", ".join(f"{factor} over {axis} {plan.mesh[axis]}" for axis, factor in placement if factor) or "replicated"


def _few(names: Iterable[str]) -> str:
    """The first two of them, by their last part if they are in one block."""
    every = [
        name.rpartition("/")[0].rpartition(".")[2] + "/" + name.rpartition("/")[2] if "/" in name else name
        for name in names
    ]
    return ", ".join(every[:2]) + (f" and {len(every) - 2} more" if len(every) > 2 else "")
