"""The end of a process that has nothing left to do."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


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
