"""The end of a process that has nothing left to do."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """End this process, at once, when its parent ends, however that does: nothing trains on that nobody watches.

    parent: its number, asked for before this process could miss the end of it.
    """
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_process(code: int) -> NoReturn:
    """End with this exit code, without taking the interpreter apart.

    Freeing a model, its graph and torch object by object takes a second and gives back nothing that the end of the
    process does not; and threads of torch that ask for the interpreter's lock meanwhile may abort the process.
    """
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # whoever read the output has had enough of it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
