"""Python's search for cyclic garbage, paused while a plan is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within the context nothing is looked through for cyclic garbage.

    What capture makes is there to stay, and much of it: looking through it again and again takes a quarter of a search,
    of whose memory less than a tenth is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
