"""Where a rank stands among the collectives of its groups, from torch's flight recorder, and what its program does.

rank 0   all_reduce 12 of ranks 0, 1 ...            waits in it
rank 1   all_reduce 11 of ranks 0, 1, done          at model.py:40 in forward: it has not come to 12
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from autopar.runtime.torch_private import group_of_name, recorded_collectives

_KEPT = "1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Of a group of ranks, the ``number``-th. what: "all_reduce". sizes: of what this rank gave, with its dtype."""

    group: str
    ranks: tuple[int, ...]
    number: int
    what: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.what} number {self.number} of {named(self.ranks)} ({self.sizes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """waits: the first collective that is not over. came: group -> number of the last one that this rank has come to.
    last: of any group. at: the line that its program is in."""

    waits: Collective | None = None
    last: Collective | None = None
    came: Mapping[str, int] = field(default_factory=dict)
    at: str = ""

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Stand:
        """From ``to_plain``."""
        both = {name: plain[name] and Collective(**{**plain[name], "ranks": tuple(plain[name]["ranks"])})
                for name in ("waits", "last")}  # fmt: skip
        return cls(**both, came=dict(plain["came"]), at=plain["at"])


def record() -> None:
    """Have torch keep the collectives of groups that are made from now on."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT)


def stand() -> Stand:
    """Of this process now; any thread may ask."""
    found = [one for one in map(_collective, recorded_collectives()) if one is not None]
    came: dict[str, int] = {}
    for collective, _ in found:
        came[collective.group] = max(came.get(collective.group, 0), collective.number)
    return Stand(
        waits=next((collective for collective, over in found if not over), None),
        last=found[-1][0] if found else None,
        came=came,
        at=_line_of_program(),
    )


def named(ranks: tuple[int, ...] | list[int]) -> str:
    """In words, the first of them."""
    first = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {first}" if len(ranks) == 1 else f"ranks {first}"


def _collective(entry: Mapping[str, Any]) -> tuple[Collective, bool] | None:
    """It, and whether it is over; None of one to one other rank, which only some backends record."""
    if entry["is_p2p"]:
        return None
    group = entry["process_group"][0]
    members = group_of_name(group)
    dtypes = dict.fromkeys(entry["input_dtypes"])
    sizes = ", ".join("×".join(map(str, size)) or "a number" for size in entry["input_sizes"][:2])
    more = ", ..." if len(entry["input_sizes"]) > 2 else ""
    made = Collective(
        group=group,
        ranks=() if members is None else tuple(dist.get_process_group_ranks(members)),
        number=entry["collective_seq_id"],
        what=entry["profiling_name"].rpartition(":")[2],
        sizes=f"{sizes}{more} {'/'.join(dtypes)}".strip(),
    )
    return made, bool(entry["retired"])


def _line_of_program() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
