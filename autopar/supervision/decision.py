"""What to do after a failure, from what the supervisors that are left know. Nothing is asked or sent here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopar.ir.errors import LaunchError
from autopar.runtime.copies.places import Copy, newest_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one supervisor knows. index: of the supervisor. slots: ranks that it can run. copies: (step, generation,
    rank, world size, rank with the rest or None) of those in the memory of its host. on_disk: the step of the newest
    checkpoint."""

    index: int
    host: str
    slots: int
    copies: tuple[tuple[int, int, int, int, int | None], ...] = ()
    on_disk: int | None = None

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Facts:
        """From an object of JSON."""
        return cls(**{**fields, "copies": tuple(tuple(copy) for copy in fields["copies"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the state comes from. step: that were made. generation: of the copies."""

    kind: Literal["start", "copies", "disk"]
    step: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """ranks: of each supervisor's index, in the order of its slots. hosts: of each. plan: its text. same_plan: as the
    job was started with. spare: ranks that there is room for beside them."""

    generation: int
    plan: str
    same_plan: bool
    ranks: dict[int, tuple[int, ...]]
    hosts: dict[int, str]
    source: Source
    spare: int = 0

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(map(len, self.ranks.values()))

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Decision:
        """From an object of JSON."""
        ranks = {int(index): tuple(own) for index, own in fields["ranks"].items()}
        hosts = {int(index): host for index, host in fields["hosts"].items()}
        return cls(**{**fields, "ranks": ranks, "hosts": hosts, "source": Source(**fields["source"])})


def next_generation(facts: Sequence[Facts], number: int, before: int) -> int:
    """A number that no generation has had: ranks meet in the store under its name, and copies lie under it.

    number: of the round. before: the generation of the round before, of which there may be no copy.
    """
    return max([number, before + 1, *(copy[1] + 1 for fact in facts for copy in fact.copies)])


Planner = Callable[[int], "tuple[int, str] | None"]
"""The largest number of ranks, up to a limit, that there is a plan for, and its text; None if there is none."""


def decide(
    facts: Sequence[Facts], generation: int, wanted: tuple[int, str], before: dict[int, tuple[int, ...]], plan: Planner
) -> Decision:
    """The next generation.

    wanted: ranks and text of the plan that the job was started with. before: the ranks of each supervisor in the
    generation before. plan: for fewer ranks than that. Raises LaunchError if there is none.
    """
    size, text = wanted
    room = sum(fact.slots for fact in facts)
    same = room >= size
    if not same:
        fewer = plan(room)
        if fewer is None:
            raise LaunchError(
                f"{room} of {size} ranks are left, and there is no plan for so few.\n"
                "  try: more hosts, or a plan that needs less memory"
            )
        size, text = fewer
    return Decision(
        generation=generation,
        plan=text,
        same_plan=same,
        ranks=places_of(facts, size, before if same else {}),
        hosts={fact.index: fact.host for fact in facts},
        source=newest(facts),
        spare=room - size,
    )


def places_of(facts: Sequence[Facts], size: int, before: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The ranks of each supervisor: those that it had, if they are still there, and of others as many as have room."""
    kept = {
        fact.index: tuple(rank for rank in before.get(fact.index, ())[: fact.slots] if rank < size) for fact in facts
    }
    taken = {rank for own in kept.values() for rank in own}
    open_ranks = [rank for rank in range(size) if rank not in taken]
    found = {}
    for fact in facts:
        more = open_ranks[: fact.slots - len(kept[fact.index])]
        open_ranks = open_ranks[len(more) :]
        found[fact.index] = (*kept[fact.index], *more)
    return found


def newest(facts: Sequence[Facts]) -> Source:
    """The latest state that is left: of the copies, if they are of no earlier step than the checkpoint."""
    copies = [
        Copy(step, generation, rank, size, rest=rest)
        for fact in facts
        for step, generation, rank, size, rest in fact.copies
    ]
    on_disk = max((fact.on_disk for fact in facts if fact.on_disk is not None), default=None)
    found = newest_complete(copies)
    if found is not None and (on_disk is None or found[0] >= on_disk):
        return Source(kind="copies", step=found[0], generation=found[1])
    if on_disk is not None:
        return Source(kind="disk", step=on_disk)
    return Source(kind="start")
