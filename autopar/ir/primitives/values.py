"""Whether tensors have numbers, on which what an op does may depend: how many rows an expert gets, where documents end.

Of a tensor that has a shape alone, such an op makes a result of the right shape, as for a capture. Where a trace is to
run later, on numbers, that would be wrong: within ``of_traces_that_run`` it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from autopar.ir.torch_private import is_fake

_runs_later: ContextVar[bool] = ContextVar("autopar trace that will run", default=False)


class NeedsValues(Exception):
    """What an op does depends on the numbers of a tensor that has none."""


def has_values(x: Tensor) -> bool:
    """Whether ``x`` has numbers, and not only a shape. Raises NeedsValues within ``of_traces_that_run`` if not."""
    if not x.is_meta and not is_fake(x):
        return True
    if not torch.compiler.is_compiling() and _runs_later.get():  # a context variable would break a compiler's graph
        raise NeedsValues("what an op does depends on numbers, and a trace has none")
    return False


@contextmanager
def of_traces_that_run() -> Iterator[None]:
    """Within it, ops are traced that will be given numbers later."""
    token = _runs_later.set(True)
    try:
        yield
    finally:
        _runs_later.reset(token)
