"""Properties of a plan that other systems cannot express, in sentences that several targets share.

Each function gives no sentence where nothing is lost.
"""

from __future__ import annotations

from autopar.export.strategy import Role, Strategy
from autopar.ir.errors import InexpressiblePlan

_SHOWN = 6
_CALLED = {"tensor": "tensor parallelism", "context": "context parallelism", "idle": "repeated work"}


def op_placements(strategy: Strategy, pattern: str) -> list[str]:
    """Ops whose placement is not what their axis is for; ``pattern``: whose fixed placement they get instead."""
    ops = strategy.exceptions
    if not ops:
        return []
    shown = "; ".join(ops[:_SHOWN]) + (f"; and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else "")
    return [f"These ops are placed as {pattern} places them, not as the plan does: {shown}."]


def kept_sets(strategy: Strategy) -> list[str]:
    """Sets of tensors that blocks keep for their backward."""
    if not strategy.kept_sets:
        return []
    return [
        f"Blocks that keep the tensors which the plan lists ({', '.join(strategy.kept_sets)}) are rematerialised in "
        "full: they keep their inputs alone, on the device, and take longer."
    ]


def eight_bits(strategy: Strategy, target: str) -> list[str]:
    """Matrix products in 8-bit floats, which ``target`` computes as the other ops."""
    plan = strategy.plan
    recipes = sorted({recipe for block in plan.blocks for recipe in block.recipes.values()})
    if not recipes:
        return []
    return [
        f"Matrix products are in {plan.precision} in {target}; some of the plan's are in 8 bits ({', '.join(recipes)})."
    ]


def per_block_zero(strategy: Strategy, zero: int) -> list[str]:
    """Blocks with a ZeRO stage or a resharding of their own."""
    plan = strategy.plan
    notes = []
    zero_stages = sorted(strategy.zero_stages, reverse=True)
    if len(zero_stages) > 1:
        names = ", ".join(
            f"{block.name} {plan.zero_of(kind)}"
            for kind, block in enumerate(plan.blocks)
            if plan.zero_of(kind) != plan.zero
        )
        notes.append(f"One ZeRO stage for all blocks: {zero}. The plan has {names}, the others {plan.zero}.")
    if zero == 3:
        kept = [b.name for k, b in enumerate(plan.blocks) if plan.zero_of(k) == 3 and not plan.reshards(k)]
        gives = [b.name for k, b in enumerate(plan.blocks) if plan.reshards(k)]
        if kept and gives:
            notes.append(
                f"All blocks give gathered parameters back after their forward; the plan keeps those of "
                f"{', '.join(kept)} until their backward, which takes fewer gathers and more memory."
            )
    return notes


def prefetch(strategy: Strategy) -> list[str]:
    """A sentence on prefetching, if the plan gathers other than one block ahead."""
    plan = strategy.plan
    if plan.prefetch == 1 or 3 not in strategy.zero_stages:
        return []
    return [f"The plan gathers {plan.prefetch} blocks ahead; the target decides itself how many."]


def offload(strategy: Strategy) -> list[str]:
    """Offload of some stages only, and to disk."""
    stages = strategy.plan.stages
    off = [number for number, stage in enumerate(stages) if stage.offload]
    blocks = sum(stage.on_disk or 0 for stage in stages)
    notes = []
    if off and len(off) < len(stages):
        notes.append(f"Offload is for all stages; the plan has it on {', '.join(map(str, off))} of {len(stages)}.")
    if blocks:
        notes.append(f"The plan keeps what it offloads of {blocks} blocks on a local disk; here it is in host memory.")
    return notes


def any_offload(strategy: Strategy) -> bool:
    """Whether the plan offloads any stage."""
    return any(stage.offload for stage in strategy.plan.stages)


def sequence_layout(strategy: Strategy, *, balanced: bool) -> list[str]:
    """``balanced``: whether the target always puts sequences that ranks share in zigzag order, or else never."""
    zigzag = strategy.plan.sequence_layout == "zigzag"
    if strategy.context == 1 or zigzag == balanced:
        return []
    if balanced:
        return ["Sequences that ranks share are in zigzag order; the plan keeps them in natural order."]
    return [
        "Sequences that ranks share are in natural order; the plan's zigzag order, with equal work for all, is lost."
    ]


def expert_capacity(strategy: Strategy) -> list[str]:
    """A sentence on the expert capacity, if the plan limits it."""
    if strategy.plan.expert_capacity is None:
        return []
    return [
        f"The plan's expert capacity of {strategy.plan.expert_capacity:g} even shares is a setting of the model there."
    ]


def expert_ranks(strategy: Strategy) -> list[str]:
    """Axes that the experts leave out, where they are over others farther out: other systems take neighbours."""
    inner = [axis for role in _NESTING for axis in reversed(strategy.axes) if axis.role == role and axis.size > 1]
    on = [place for place, axis in enumerate(inner) if axis.experts]
    if not on:
        return []
    left = [axis.name for axis in inner[: max(on)] if not axis.experts and not axis.expert_width]
    if not left:
        return []
    return [
        "Experts are over neighbouring ranks: of tensor groups first, then of context, then of data groups; the plan "
        f"leaves out {', '.join(left)}. Their tokens take other links than was predicted."
    ]


_NESTING = ("tensor", "context", "data")


def rank_order(strategy: Strategy) -> list[str]:
    """Axes that other systems nest otherwise: tensor groups innermost, then context, then data groups."""
    nesting = [_NESTING.index(axis.role) for axis in reversed(strategy.axes) if axis.size > 1]
    if nesting == sorted(nesting):
        return []
    order = ", ".join(axis.name for axis in strategy.axes if axis.size > 1)
    return [
        "Ranks are numbered with tensor groups innermost, then context, then data groups; the plan's axes are, "
        f"outermost first, {order}. Other ranks share a node, so communication takes other links than was predicted."
    ]


def refuse(
    strategy: Strategy, target: str, roles: tuple[Role, ...], *, experts: bool, pipeline: bool, why: str
) -> None:
    """Raise InexpressiblePlan if the plan has a kind of parallelism that ``target`` has not.

    roles: of axes that it has not. experts, pipeline: whether it has not those. why: a sentence on what it is for.
    """
    found = [
        f"{_CALLED[role]} ({' × '.join(f'{axis.name} {axis.size}' for axis in axes)})"
        for role in roles
        if (axes := strategy.of_role(role))
    ]
    if experts and strategy.experts > 1:
        names = (f"{axis.name} {axis.size}" for axis in strategy.axes if axis.experts)
        found.append(f"expert parallelism ({' × '.join(names)})")
    if pipeline and strategy.pipeline > 1:
        found.append(f"a pipeline (pp {strategy.pipeline})")
    if found:
        raise InexpressiblePlan(
            f"{target} cannot say {' and '.join(found)}.\n  the plan: {strategy.in_words()}\n  {target}: {why}\n"
            f"  try: {_others(strategy)}"
        )


def refuse_idle(strategy: Strategy, target: str) -> None:
    """Raise InexpressiblePlan where ranks repeat each other, which no other system does on purpose."""
    idle = strategy.of_role("idle")
    if not idle:
        return
    names = " × ".join(f"{axis.name} {axis.size}" for axis in idle)
    copied = [axis.name for axis in idle if axis.experts == "copied"]
    if copied:
        raise InexpressiblePlan(
            f"{target} cannot say that the ranks of {', '.join(copied)} share experts and have the same tokens.\n"
            f"  expected: expert ranks with rows of their own\n  got: {strategy.in_words()}\n"
            "  try: a batch that divides over the expert ranks too, so that tokens are dispatched, and search again"
        )
    raise InexpressiblePlan(
        f"{target} cannot say that ranks repeat each other's work, as on {names}.\n  the plan: {strategy.in_words()}\n"
        "  try: a search with --dp, --tp or --cp in place of that axis"
    )


def _others(strategy: Strategy) -> str:
    """Targets that have what was refused, and what to search for otherwise."""
    launchers = "slurm, pytorchjob or rayjob, which run the plan as it is"
    if strategy.idle > 1:
        return launchers
    return f"--to megatron or torchtitan; {launchers}; or a search with --tp 1 --cp 1 --ep 1 --pp 1"
