"""PyTorch: a module that wraps a model as the plan's data axes do, with FSDP2 (ZeRO-1 to 3, hybrid) or DDP (ZeRO-0).

The code finds the plan's blocks by name in the model it is given, wraps each, and runs a step of microbatches with the
communication that the ZeRO stages mean, as ``autopar.runtime.zero`` does.
"""

from __future__ import annotations

from itertools import groupby

from autopar.export import lost
from autopar.export.exported import Exported, Options, commented
from autopar.export.rendering import render
from autopar.export.strategy import Strategy
from autopar.ir.plan import Plan


def write(strategy: Strategy, options: Options) -> Exported:
    """Raises InexpressiblePlan for anything but data parallelism."""
    lost.refuse(
        strategy,
        "FSDP",
        ("tensor", "context", "idle"),
        experts=True,
        pipeline=True,
        why="shards parameters over ranks that have rows of their own, and nothing else",
    )
    plan = strategy.plan
    notes = lost.kept_sets(strategy)
    if plan.zero and 0 in strategy.zero_stages:
        names = ", ".join(block.name for kind, block in enumerate(plan.blocks) if not plan.zero_of(kind))
        notes.append(
            f"{names}: at ZeRO-1 instead of 0, as FSDP shards all that it wraps. One gather a step more, less memory."
        )
    notes += lost.op_placements(strategy, "FSDP") + lost.eight_bits(strategy, "the script")
    if plan.precision == "fp16":
        notes.append("float16 wants a loss scaler: torch.amp.GradScaler around loss_of and the optimiser.")
    notes.append(
        "Losses of microbatches and ranks are averaged. If they are means over unequal numbers of valid tokens, that "
        "is not the mean over all tokens, which autopar takes."
    )
    heading = (
        f"{plan.model.name} with {'FSDP2' if plan.zero else 'DistributedDataParallel'}: {strategy.in_words()}.\n"
        "Written by autopar export --to fsdp."
    )
    shown = {axis.name for axis in strategy.zero_axes}
    text = render(
        "fsdp.py.jinja",
        head=commented(notes, heading),
        zero=plan.zero,
        world=plan.num_ranks,
        axes={axis.name: axis.size for axis in strategy.axes if axis.size > 1},
        sharded=tuple(axis.name for axis in strategy.axes if axis.name in shown),
        num_microbatches=strategy.num_microbatches,
        microbatch_size=strategy.microbatch_size,
        dtype={"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(plan.precision),
        prefetch=plan.prefetch,
        reshard=plan.zero == 3 and plan.reshard_after_forward,
        offload=lost.any_offload(strategy),
        blocks=_blocks(plan),
        remat=sorted({level for levels in _remat(plan) for level, _ in levels} - {"none"}),
    )
    return Exported(target="fsdp", name="fsdp_plan.py", text=text, notes=tuple(notes))


def _blocks(plan: Plan) -> list[dict[str, object]]:
    """The arguments of ``Block`` in the template, as Python."""
    return [
        {
            "name": block.name,
            "repeats": block.repeats,
            "zero": plan.zero and max(1, plan.zero_of(kind)),
            "reshard": plan.reshards(kind),
            "remat": levels,
        }
        for kind, (block, levels) in enumerate(zip(plan.blocks, _remat(plan), strict=True))
    ]


def _remat(plan: Plan) -> list[tuple[tuple[str, int], ...]]:
    """For each kind of block, levels of rematerialisation with how many instances have them, in order."""
    levels: list[str] = []
    for stage in plan.stages:
        own: list[str] = []
        own += ["full"] * stage.remat.get("full", 0)
        own += ["alternate"] * stage.remat.get("alternate", 0)
        own += ["selective"] * stage.remat.get("selective", 0)
        levels += own + ["none"] * (stage.last - stage.first + 1 - len(own))
    found, at = [], 0
    for block in plan.blocks:
        mine = levels[at : at + block.repeats]
        found.append(tuple((level, len(list(run))) for level, run in groupby(mine)))
        at += block.repeats
    return found
