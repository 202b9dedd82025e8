"""Prices of parameters, and those that ZeRO shards alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_model.compute.op_time import OpTime

MASTER = 4  # bytes of a stored parameter and of its gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPrice:
    """One parameter under its uses.

    numel: elements of it on a rank before ZeRO, which cuts them into ``shards``. requires_grad: whether it has a
    gradient. sync_axes: axes over which its gradient is all-reduced once a step; zero_axes: axes that ZeRO shards it
    over, for a frozen parameter at stage 3 alone, which gathers it. micro: added to every microbatch (casts,
    redistributions of later uses), cast_s of it for casts. zero, reshard: stage, and whether stage 3 reshards it after
    forward. itemsize: bytes of a stored element, of a frozen parameter. gathered: of an element as ZeRO gathers it.
    """

    numel: float
    requires_grad: bool
    sync_axes: tuple[int, ...]
    zero_axes: tuple[int, ...]
    micro: OpTime
    cast_s: float
    zero: int
    reshard: bool
    shards: int
    itemsize: int = MASTER
    gathered: int


class Together(NamedTuple):
    """Tensors that ZeRO shards alike: elements, number, share of elements that train, and bytes when gathered."""

    numel: float
    num_tensors: int
    trained: float
    gathered_bytes: float


def by_zero_stage(prices: Iterable[ParameterPrice]) -> dict[tuple[int, bool, tuple[int, ...]], Together]:
    """(ZeRO stage, whether it is resharded after forward, axes) -> the tensors that ZeRO shards so."""
    found: dict[tuple[int, bool, tuple[int, ...]], list[ParameterPrice]] = {}
    for price in prices:
        if price.zero_axes:
            found.setdefault((price.zero, price.reshard, price.zero_axes), []).append(price)
    together = {}
    for key, own in found.items():
        numel = sum(price.numel for price in own)
        trained = sum(price.numel for price in own if price.requires_grad) / numel
        together[key] = Together(numel, len(own), trained, sum(price.numel * price.gathered for price in own))
    return together
