"""Ranks that hold the same parameter compare its bits: what a faulty device has changed in one of them is found.

    step 40    rank 0  first.weight 8f31  first.bias 07aa
               rank 1  first.weight 8f31  first.bias 07aa
               rank 2  first.weight 8f33  first.bias 07aa      rank 2 has other values of first.weight

Compared are ranks between which the gradient of the parameter is summed last: these get the same bits from the sum, and
make the same update of them. Copies whose gradients each rank computes for itself may round differently.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import CopiesDiffer, InvalidInput
from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.check_sum import check_sum
from autopar.runtime.module import ParallelModule
from autopar.runtime.state import Stored


class Replicas:
    """Parameters that several ranks hold. All ranks make one together."""

    def __init__(self, parallel: ParallelModule) -> None:
        """Raises InvalidInput, on every rank, if the plan has no two ranks hold the same."""
        self._parallel = parallel
        engine = parallel.engine
        keys = [
            _key(name, engine.mesh.pipeline_rank, self._others(engine.stored[name], parameter.requires_grad))
            for name, parameter in parallel.named_parameters()
        ]
        count = torch.tensor(len(keys), device=engine.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        self._room = int(count)
        self._keys = keys
        self._holders: dict[int, list[tuple[int, int]]] = {}
        for rank, row in enumerate(self._gathered(keys)):
            for place, key in enumerate(row):
                if key:
                    self._holders.setdefault(key, []).append((rank, place))
        if all(len(holders) == 1 for holders in self._holders.values()):
            raise InvalidInput(
                "--check-copies-every compares ranks that hold the same parameters, and under this plan none do.\n"
                "  try: a plan with data-parallel ranks that do not shard (ZeRO 0), or without the option"
            )
        self._good = 0

    def check(self, step: int) -> None:
        """Raise CopiesDiffer, on every rank, if ranks have other values of the same. All ranks call together.

        step: the steps that were made, to be told.
        """
        own = [check_sum(local_of(parameter)) for _, parameter in self._parallel.named_parameters()]
        sums = self._gathered(own)
        found = []
        for (name, _), key in zip(self._parallel.named_parameters(), self._keys, strict=True):
            of_rank = {rank: sums[rank][place] for rank, place in self._holders[key]}
            if len(set(of_rank.values())) > 1:
                found.append((name, of_rank))
        # Ranks of other stages know other parameters.
        everywhere: list[Any] = [None] * dist.get_world_size()
        if self._any(bool(found)):
            dist.all_gather_object(everywhere, found)
            name, of_rank = next(one for some in everywhere for one in some)
            names = {other for some in everywhere for other, _ in some}
            raise CopiesDiffer(f"step {step}: {in_words(name, of_rank, len(names))}{self._since(step)}")
        self._good = step

    def _others(self, stored: Stored, trains: bool) -> tuple[tuple[int, int], ...]:
        """Axis and this rank's coordinate on it, of those on which ranks are not compared."""
        layout, mesh = stored.layout, self._parallel.engine.mesh
        summed_last = [axis for axis in layout.partial_axes if axis not in stored.summed_axes]
        replicas = [axis for axis in stored.summed_axes if axis not in stored.zero_axes]
        if not trains:  # it is as it was at first
            whole = [axis for axis, placement in enumerate(layout.layout) if placement.is_replicate()]
            summed_last = [axis for axis in whole if axis not in stored.zero_axes]
        elif mesh.size(summed_last) == 1:
            summed_last = replicas
        return tuple((axis, at) for axis, at in enumerate(mesh.coordinates) if axis not in summed_last)

    def _gathered(self, numbers: list[int]) -> list[list[int]]:
        """Those of each rank, zeros behind them."""
        own = torch.zeros(self._room, dtype=torch.int64)
        own[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        own = own.to(self._parallel.engine.device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def _any(self, here: bool) -> bool:
        seen = torch.tensor(int(here), device=self._parallel.engine.device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen)

    def _since(self, step: int) -> str:
        since = f"after step {self._good}" if self._good else "since training began here"
        return f"\n  it happened {since}, when they were the same; nothing of step {step} is saved"


def in_words(name: str, of_rank: Mapping[int, int], count: int) -> str:
    """Who has other values of a parameter. of_rank: check sums. count: parameters that differ, this one among them."""
    others = f", and so do {count - 1} other parameters" if count > 1 else ""
    odd = minority(of_rank)
    if odd is None:
        return (
            f"ranks {', '.join(map(str, of_rank))} hold the same {name}, and it differs{others}. Which of them is "
            "wrong cannot be told, as no value is that of most"
        )
    ranks, have = (", ".join(map(str, odd)), "has" if len(odd) == 1 else "have")
    return (
        f"rank {ranks} {have} other values of {name} than the {len(of_rank) - len(odd)} other ranks that hold the "
        f"same{others}. A device or memory there is likely to be faulty"
    )


def minority(of_rank: Mapping[int, int]) -> list[int] | None:
    """The ranks whose check sum is not that of more than half; None if there is no such sum."""
    usual, count = Counter(of_rank.values()).most_common(1)[0]
    return [rank for rank, one in of_rank.items() if one != usual] if 2 * count > len(of_rank) else None


def _key(name: str, pipeline_rank: int, others: tuple[tuple[int, int], ...]) -> int:
    """A number, not zero, that is the same on ranks that hold the same."""
    digest = hashlib.blake2b(repr((name, pipeline_rank, others)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) + 1
