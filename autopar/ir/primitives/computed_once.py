"""Work that the recomputation of a block need not repeat: its results are saved from forward.

Rematerialisation of blocks says how, within ``keeping``; elsewhere the work is simply done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
Work = Callable[[], Results]

_keeper: ContextVar[Callable[[Work], Results] | None] = ContextVar("autopar keeper of results", default=None)


def computed_once(work: Work) -> Results:
    """The results of ``work``, for which it may run at an earlier time. They are not to be written to."""
    if torch.compiler.is_compiling():  # it decides by itself, and a context variable would break the traced graph
        return work()
    keeper = _keeper.get()
    return work() if keeper is None else keeper(work)


@contextmanager
def keeping(keeper: Callable[[Work], Results]) -> Iterator[None]:
    """Within it ``computed_once`` asks ``keeper``."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)
