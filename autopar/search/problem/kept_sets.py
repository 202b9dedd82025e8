"""Sets of tensors that blocks may keep for their backward, beside the levels of rematerialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.ir.rematerialisation import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSets:
    """What blocks keep where the plan says ``name``. listed: of each kind of block, as the plan lists it; None of one
    that keeps everything. host: of each kind, what of that waits in host memory."""

    name: str
    listed: tuple[tuple[str, ...] | None, ...]
    host: tuple[tuple[str, ...], ...]


def sets_of(plan: Plan) -> tuple[KeptSets, ...]:
    """The sets of a plan."""
    found = []
    for name in dict.fromkeys(name for block in plan.blocks for name in block.kept):
        kept = (block.kept.get(name) for block in plan.blocks)
        listed = tuple(None if own is None else tuple(own) for own in kept)
        host = tuple(tuple((block.host or {}).get(name, ())) for block in plan.blocks)
        found.append(KeptSets(name=name, listed=listed, host=host))
    return tuple(found)


def level_names(kept: Sequence[KeptSets]) -> tuple[str, ...]:
    """Names of the levels, by index: LEVELS, then the sets."""
    return *LEVELS, *(sets.name for sets in kept)
