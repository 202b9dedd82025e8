"""The command ``autopar``."""

from __future__ import annotations

import gc


def main() -> None:
    """Runs the command line. Exit code 2 and one message for what a user can mend, without a traceback."""
    # What imports and capture make is there to stay. Looking through it for garbage takes a sixth of a search, and a
    # search leaves less than a tenth of its memory behind; commands that train collect as usual.
    gc.disable()
    from autopar.cli.app import run

    run()
