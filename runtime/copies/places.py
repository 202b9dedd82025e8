"""Where copies are: on this host, of its own ranks and of those whose partners they are.

    FOLDER/g0003/rank-00002.0    rank 2 in generation 3 of the job, the one of two copies that is written in turns
    FOLDER/g0003/rank-00002.1

A generation is what runs between two failures; ranks of another one may be others, under another plan.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopar.runtime.copies.slot import peek

SLOTS = 2

_GENERATION = re.compile(r"g(\d{4,})")
_RANK = re.compile(r"rank-(\d{5,})\.[01]")


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A complete copy of a rank's state that a host has. Those of a later step come last in order. rest: the rank whose
    own copy has the tensors that were not sent with this one; None where all are in it."""

    step: int
    generation: int
    rank: int
    world_size: int
    path: Path = Path()
    rest: int | None = field(default=None, compare=False)


def memory_folder() -> Path:
    """A file system in memory, which outlives processes and not the host; the folder of temporary files without one."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def slot_path(folder: Path, generation: int, rank: int, step: int) -> Path:
    """The file of a rank's copy after a step."""
    return folder / f"g{generation:04d}" / f"rank-{rank:05d}.{step % SLOTS}"


def copies_in(folder: Path) -> list[Copy]:
    """The complete copies in a folder, in order."""
    found = []
    for path in folder.glob("g*/rank-*"):
        generation = _GENERATION.fullmatch(path.parent.name)
        if generation and _RANK.fullmatch(path.name) and (seen := peek(path)) is not None:
            found.append(Copy(seen.step, int(generation[1]), seen.rank, seen.world_size, path, seen.rest))
    return sorted(found)


def newest_complete(copies: Sequence[Copy]) -> tuple[int, int] | None:
    """(step, generation) of the latest state of which there is a copy of every rank; None where there is none."""
    ranks: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for copy in usable(copies, copies):
        ranks.setdefault((copy.step, copy.generation), set()).add(copy.rank)
        sizes[copy.step, copy.generation] = copy.world_size
    complete = [key for key, found in ranks.items() if found == set(range(sizes[key]))]
    return max(complete, default=None)


def usable(copies: Sequence[Copy], among: Sequence[Copy]) -> list[Copy]:
    """Those that are whole, and those of which the rest is ``among`` others."""
    whole = {(copy.step, copy.generation, copy.rank) for copy in among if copy.rest is None}
    return [copy for copy in copies if copy.rest is None or (copy.step, copy.generation, copy.rest) in whole]


def forget_others(folder: Path, generation: int) -> None:
    """Remove the copies of other generations."""
    for path in folder.glob("g*"):
        found = _GENERATION.fullmatch(path.name)
        if found and int(found[1]) != generation:
            shutil.rmtree(path, ignore_errors=True)
