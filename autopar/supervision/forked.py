"""A process that a supervisor has forked: it ends with it, and has none of its duties."""

from __future__ import annotations

import atexit
import ctypes
import signal
from contextlib import suppress
from multiprocessing import util

from autopar.process_end import end_with

_SET_NAME = 15


def die_with(parent: int, name: str) -> None:
    """End this process when its parent does; signals do what they do by default. name: for lists of processes, at most
    15 characters."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # It would end the processes that the parent has started. No public name leads to it.
    atexit.unregister(util._exit_function)  # type: ignore[attr-defined]
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None, use_errno=True).prctl(_SET_NAME, name.encode())
    end_with(parent)
