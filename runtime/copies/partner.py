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


class Partner:
    """Of one rank. All ranks make one together, and call its methods in the same order.

    hosts: of each rank. path: of the copy of a rank and step that this one takes.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[str], path: Callable[[int, int], Path]) -> None:
        self._group, self._path = group, path
        self.rank, self._sources = partners(hosts, dist.get_rank())
        self._told: Sequence[Part] | None = None
        self._has: frozenset[Part] = frozenset()
        self._received: dict[tuple[int, int], torch.Tensor] = {}

    def parts(self, own: Sequence[Part]) -> frozenset[Part]:
        """What the partner has of the state in this step. own: what this rank has. Each is sent where it is new."""
        if self.rank is None and not self._sources:
            return self._has
        news = b"" if own == self._told else json.dumps(own).encode()
        self._told = own
        lengths = self._passed(torch.tensor([len(news)]), _number, back=True)
        text = torch.tensor(list(news), dtype=torch.uint8)
        found = self._passed(text, lambda rank: torch.empty(int(lengths[rank]), dtype=torch.uint8), back=True)
        for data in found.values():
            if data.numel():
                self._has = frozenset(map(_part, json.loads(bytes(data.tolist()))))
        return self._has

    def exchange(self, slot: Slot, step: int) -> None:
        """Send this rank's copy, and take those of others."""
        if self.rank is None and not self._sources:
            return
        sent = slot.beginning
        sizes = self._passed(torch.tensor([sent.numel()]), _number)
        files = {source: self._place_of(source, step, int(size)) for source, size in sizes.items()}
        for data in files.values():
            set_step(data, -1)
        self._passed(sent[BODY:], lambda source: files[source][BODY:])
        for data in files.values():
            set_step(data, step)

    def forget(self) -> None:
        """The copies that were taken count no more."""
        for data in self._received.values():
            set_step(data, -1)

    def _passed(
        self, own: torch.Tensor, room: Callable[[int], torch.Tensor], back: bool = False
    ) -> Mapping[int, torch.Tensor]:
        """What is sent here, by rank, in the room made for it. back: from the partner to those that send to it."""
        to, sources = [self.rank] if self.rank is not None else [], self._sources
        if back:
            to, sources = sources, to
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
