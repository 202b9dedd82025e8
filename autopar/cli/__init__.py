"""The command ``autopar``."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress


def main() -> None:
    """Runs the command line. Exit code 2 and one message for what a user can mend, without a traceback."""
    # What imports and capture make is there to stay. Looking through it for garbage takes a sixth of a search, and a
    # search leaves less than a tenth of its memory behind; commands that train collect as usual.
    gc.disable()
    from autopar.cli.app import run

    run()


def command() -> None:
    """The same as a process of its own. One that only planned ends at once: taking a model, its graph and torch apart
    object by object takes a second and frees nothing that the end of the process does not."""
    try:
        main()
    except SystemExit as stop:
        if gc.isenabled() or not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    else:
        code = 0
    with suppress(BrokenPipeError):  # whoever read the output has had enough of it
        sys.stdout.flush()
        sys.stderr.flush()
    if not gc.isenabled():
        os._exit(code)
