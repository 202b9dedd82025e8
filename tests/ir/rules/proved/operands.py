"""A call whose rule is proved, and tensors of random numbers to make it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_generator = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def c(*shape: int) -> Tensor:
    return torch.complex(r(*shape), r(*shape))


def pos(*shape: int) -> Tensor:
    return r(*shape).abs() + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def bools(*shape: int) -> Tensor:
    return r(*shape) > 0


# (expected shardable factors and number of linear sets, op, arguments)
Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def case(expected: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    return expected, target, args, kwargs
