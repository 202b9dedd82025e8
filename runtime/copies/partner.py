"""Copies sent to a rank on another host, and taken from the ranks whose partner this one is.

Of what a partner has itself, as a data-parallel replica has the parameters, nothing is sent: its own copy is the rest
of the one that it is sent. So each rank sends a list of its parts of the state to the ranks that send it copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.copies.places import SLOTS
from autopar.runtime.copies.slot import BODY, Part, Slot, set_step

# Elements of one message.
_AT_A_TIME = 1 << 28
_NEW = -1  # the size of a copy that is not yet known


class Partner:
    """Of one rank. All ranks make one together, and call its methods in the same order.

    hosts: of each rank. path: of the copy of a rank and step that this one takes.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[str], path: Callable[[int, int], Path]) -> None:
        self._group, self._path = group, path
        self.rank, self._sources = partners(hosts, dist.get_rank())
        self._told: Sequence[Part] | None = None
        self.has: frozenset[Part] = frozenset()
        """What the partner has of the state."""
        self._resized, self._sizes = False, dict.fromkeys(self._sources, _NEW)
        self._received: dict[tuple[int, int], torch.Tensor] = {}

    def agree(self, own: Sequence[Part], outgrown: bool) -> bool:
        """Tell those that send here what this rank has of the state in this step, where it is new, and find what the
        partner has. outgrown: the copy has no room for this step's values. Returns True where this rank's copies have
        another size than before, which it then sends with the copy."""
        news = b"" if own == self._told else json.dumps(own).encode()
        self._told, self._resized = own, bool(news) or outgrown
        if self.rank is None and not self._sources:
            return self._resized
        partner = [self.rank] if self.rank is not None else []
        neighbours = sorted({*partner, *self._sources})
        said = self._passed(
            torch.tensor([len(news), outgrown]), lambda _: torch.zeros(2, dtype=torch.int64), neighbours, neighbours
        )
        for source in self._sources:
            if news or said[source].any():
                self._sizes[source] = _NEW
        lengths = {rank: int(said[rank][0]) for rank in partner}
        text = torch.tensor(list(news), dtype=torch.uint8)
        found = self._passed(text, lambda rank: torch.empty(lengths[rank], dtype=torch.uint8), self._sources, partner)
        for data in found.values():
            if data.numel():
                self.has, self._resized = frozenset(map(_part, json.loads(bytes(data.tolist())))), True
        return self._resized

    def exchange(self, slot: Slot, step: int) -> None:
        """Send this rank's copy, and take those of others."""
        partner = [self.rank] if self.rank is not None else []
        sent = slot.beginning
        new = [source for source, size in self._sizes.items() if size == _NEW]
        sizes = self._passed(torch.tensor([sent.numel()]), _number, partner if self._resized else [], new)
        self._sizes |= {source: int(size) for source, size in sizes.items()}
        files = {source: self._place_of(source, step, size) for source, size in self._sizes.items()}
        for data in files.values():
            set_step(data, -1)
        self._passed(sent[BODY:], lambda source: files[source][BODY:], partner, self._sources)
        for data in files.values():
            set_step(data, step)

    def forget(self) -> None:
        """The copies that were taken count no more."""
        for data in self._received.values():
            set_step(data, -1)

    def _passed(
        self, own: torch.Tensor, room: Callable[[int], torch.Tensor], to: Sequence[int], sources: Sequence[int]
    ) -> Mapping[int, torch.Tensor]:
        """What is sent here, by rank, in the room made for it. own: is sent to each rank of ``to``."""
        here = {source: room(source) for source in sources}
        works = [dist.isend(part, rank, group=self._group) for rank in to for part in _messages(own)]
        works += [
            dist.irecv(part, source, group=self._group) for source, data in here.items() for part in _messages(data)
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        return here

    def _place_of(self, source: int, step: int, size: int) -> torch.Tensor:
        key = source, step % SLOTS
        if key not in self._received or self._received[key].numel() != size:
            self._received[key] = Slot.empty(self._path(source, step), size)
        return self._received[key]


def partners(hosts: Sequence[str], rank: int) -> tuple[int | None, list[int]]:
    """The rank that a rank sends its copies to, and those that it gets copies of: on the next host, the one at the same
    place, round and round if it has fewer. (None, []) on a single host."""
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None, []
    on = {name: [number for number, host in enumerate(hosts) if host == name] for name in names}

    def partner(one: int) -> int:
        own = on[hosts[one]]
        next_ones = on[names[(names.index(hosts[one]) + 1) % len(names)]]
        return next_ones[own.index(one) % len(next_ones)]

    return partner(rank), [one for one in range(len(hosts)) if one != rank and partner(one) == rank]


def _number(_: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


def _messages(data: torch.Tensor) -> Sequence[torch.Tensor]:
    """None for no bytes."""
    return data.split(_AT_A_TIME) if data.numel() else ()


def _part(fields: Sequence[Any]) -> Part:
    key, dtype, *places = fields
    shape, offsets, sizes = map(tuple, places)
    return key, dtype, shape, offsets, sizes
