"""Steps that may fail on some ranks: all ranks learn of it, so that none waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from autopar.ir.errors import AutoparError, InvalidInput

T = TypeVar("T")


def agree(work: Callable[[], T]) -> T:
    """``work()`` on every rank. If it raises an AutoparError on some rank, all ranks raise one.

    The rank that failed raises its own error, the others that of the first rank that failed. ``work`` must not
    communicate.
    """
    if dist.get_backend() == "fake":
        return work()  # the other ranks are not there
    failure: AutoparError | None = None
    report: AutoparError | str | None = None
    try:
        value = work()
    except AutoparError as error:
        failure = report = error
    except BaseException as error:
        report = f"{type(error).__name__}: {error}"
        raise
    finally:
        # Here, so that the others do not wait if an unexpected error is on its way out of this rank.
        reports: list[AutoparError | str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reports):
        if isinstance(other, AutoparError):
            raise type(other)(f"on rank {rank}: {other}")
        if other is not None:
            raise AutoparError(f"on rank {rank}: {other}; its own output says more")
    return value


def from_first(work: Callable[[], str]) -> str:
    """The text that ``work()`` gives on rank 0, on every rank. Raises on all ranks if it raises there."""
    text: list[str] = [""]

    def run() -> None:
        if dist.get_rank() == 0:
            text[0] = work()

    agree(run)
    dist.broadcast_object_list(text, src=0)
    return text[0]


def agree_same(values: Mapping[str, object], what: str) -> None:
    """Raise InvalidInput, on all ranks, unless each of ``values`` is the same on all of them."""
    if dist.get_backend() == "fake":
        return
    found: list[Mapping[str, object]] = [values] * dist.get_world_size()
    dist.all_gather_object(found, values)
    for rank, other in enumerate(found):
        for name in dict.fromkeys((*found[0], *other)):
            first, own = found[0].get(name), other.get(name)
            if first != own:
                raise InvalidInput(
                    f"{what}: ranks disagree on {name}: {first} on rank 0, {own} on rank {rank}.\n"
                    "  expected: the same on every rank"
                )
