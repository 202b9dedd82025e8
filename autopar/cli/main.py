"""The command ``autopar``: from the start of its process to its end."""

from __future__ import annotations

import gc
import os
import sys

from autopar.process_end import end_process
from autopar.supervision.local_workers import is_to_wait, wait_for_supervisor


def main() -> None:
    """Runs the command line. Exit code 2 and one message for what a user can mend, without a traceback."""
    # From the imports on, for the reason that autopar.garbage gives; commands that train collect as usual.
    gc.disable()
    if any(word.partition("=")[0] == "--disk" for word in sys.argv):
        # Memory that tensors free is given back where state is on disk. Before torch's first tensor: large ones on CPUs
        # are in pages of 2 MiB, where the system has them, of which there are fewer to ask for again.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "--keep-alive" in sys.argv:  # before torch is imported
        # Of a store that is lost torch warns with a stack of C++ for each call; supervisors say it in a line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if is_to_wait(os.environ):
            wait_for_supervisor()
    from autopar.cli.app import run

    run()


def command() -> None:
    """``main`` as a process of its own, which ends at once if it only planned."""
    try:
        main()
    except SystemExit as stop:
        if gc.isenabled() or not isinstance(stop.code, int | None):
            raise
        end_process(stop.code or 0)
    if not gc.isenabled():
        end_process(0)
