"""Buckets of gradients: early, and several of them to every backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.runtime.gradients import FIRST_BUCKET_BYTES, LEAST_BUCKETS, MOST_BUCKET_BYTES, _make_buckets, _Slot

MIB = 1 << 20


def slots(sizes: list[int]) -> list[_Slot]:
    """Of gradients of so many bytes, in the order in which a backward completes them."""
    group: Any = SimpleNamespace(group_name="dp")
    made = [_Slot(nn.Parameter(torch.empty(size // 4)), group, None, 0) for size in sizes]
    for slot in made:
        slot.parameter.grad = torch.ones_like(slot.parameter)
    return made


def bytes_of(sizes: list[int]) -> list[int]:
    found = []
    for bucket in _make_buckets(slots(sizes)):
        held = bucket.slots[0].parameter.grad if bucket.flat is None else bucket.flat
        assert held is not None
        found.append(held.nbytes)
    assert sum(found) == sum(sizes)
    return found


def test_a_small_model_has_several_buckets() -> None:
    first, *others = bytes_of([MIB // 4] * 64)
    assert first == FIRST_BUCKET_BYTES
    assert len(others) >= LEAST_BUCKETS - 1 and max(others) <= 16 * MIB / LEAST_BUCKETS


def test_a_bucket_is_not_larger_than_it_need_be() -> None:
    first, *others = bytes_of([MIB] * 400)
    assert first == FIRST_BUCKET_BYTES
    assert max(others) == MOST_BUCKET_BYTES


def test_a_large_gradient_goes_by_itself() -> None:
    assert bytes_of([MIB, 32 * MIB, MIB // 2, MIB // 2]) == [MIB, 32 * MIB, MIB]
