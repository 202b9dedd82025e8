"""The command ``autopar``."""

from __future__ import annotations


def main() -> None:
    """Runs the command line. Exit code 2 and one message for what a user can mend, without a traceback."""
    from autopar.cli.app import run

    run()
