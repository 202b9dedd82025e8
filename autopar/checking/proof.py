"""The proof of the programs of all ranks. Those that run the same programs are one class, and are proved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.checking.ranks import Programs
from autopar.ir.errors import UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.passes.verify.placements import verify_placements


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedRanks:
    """A class of ranks. problem: why their programs are not proved, None if they are."""

    ranks: tuple[int, ...]
    problem: str | None = None


def prove_ranks(captured: CapturedModel, plan: Plan, programs: Programs) -> tuple[ProvedRanks, ...]:
    """Every rank of ``plan``, by what it runs. captured: the model of which the programs were made."""
    classes: dict[int, tuple[Sequence[StageProgram], list[int]]] = {}
    for rank in range(plan.num_ranks):
        own = programs(rank)
        classes.setdefault(id(own), (own, []))[1].append(rank)
    return tuple(
        ProvedRanks(ranks=tuple(ranks), problem=_problem(captured, own, plan)) for own, ranks in classes.values()
    )


def _problem(captured: CapturedModel, programs: Sequence[StageProgram], plan: Plan) -> str | None:
    try:
        verify_placements(captured, programs, plan)
    except UnprovenProgram as error:
        return str(error)
    return None
