"""The layers of a plan's stages, for systems that count layers where a plan counts blocks.

A layer is a block that repeats, or one that is called after a place in a list, as ``model.layers.0`` is. Blocks before
the first layer embed; those after the last one normalise, project and take the loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.export.strategy import kind_of, op_of
from autopar.ir.plan import BlockPlan, Plan


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One stage: its number of layers, and whether blocks before the first layer or after the last one are on it."""

    count: int
    before: bool
    after: bool


def is_layer(block: BlockPlan) -> bool:
    """Whether a block is a layer: it repeats, or its name has a number."""
    return block.repeats > 1 or any(part == "*" or part.isdigit() for part in block.name.split("."))


def layers_in(block: BlockPlan) -> int:
    """Layers in one instance of a block: as many as it has attentions, if the plan divides any.

    Layers that take turns, with a window and without, make one block of two.
    """
    attentions = sum(kind_of(op_of(key)) == "attention" for key in block.ops)
    return max(1, attentions)


def stage_layers(plan: Plan) -> tuple[StageLayers, ...]:
    """The layers of every stage, in order."""
    instances = [layers_in(block) if is_layer(block) else 0 for block in plan.blocks for _ in range(block.repeats)]
    inside = [index for index, count in enumerate(instances) if count]
    first, last = (inside[0], inside[-1]) if inside else (len(instances), len(instances))
    return tuple(
        StageLayers(
            count=sum(instances[stage.first : stage.last + 1]),
            before=stage.first < first,
            after=stage.last > last,
        )
        for stage in plan.stages
    )


def num_layers(plan: Plan) -> int:
    """Number of layers of all stages."""
    return sum(stage.count for stage in stage_layers(plan))


def is_even(stages: tuple[StageLayers, ...]) -> bool:
    """Whether all stages have equally many layers, embedding on the first and loss on the last."""
    return (
        len({stage.count for stage in stages}) == 1
        and not any(stage.before for stage in stages[1:])
        and not any(stage.after for stage in stages[:-1])
    )


@dataclass(frozen=True, slots=True)
class Rematerialised:
    """Layers of a stage by level of rematerialisation."""

    full: int
    alternate: int
    selective: int
    kept: int


def rematerialised(plan: Plan) -> tuple[Rematerialised, ...]:
    """Layers of every stage by rematerialisation level. The levels come in this order, from the stage's first block on;
    other blocks do not count."""
    instances = [layers_in(block) if is_layer(block) else 0 for block in plan.blocks for _ in range(block.repeats)]
    found = []
    for stage in plan.stages:
        levels = [level for level in ("full", "alternate", "selective") for _ in range(stage.remat.get(level, 0))]  # type: ignore[call-overload]
        counts: Counter[str] = Counter()
        for place, index in enumerate(range(stage.first, stage.last + 1)):
            counts[levels[place] if place < len(levels) else "kept"] += instances[index]
        found.append(Rematerialised(counts["full"], counts["alternate"], counts["selective"], counts["kept"]))
    return tuple(found)
