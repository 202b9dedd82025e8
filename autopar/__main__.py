"""``python -m autopar``, which torchrun can start."""

from autopar.cli.app import run

run()
