"""``python -m autopar``, which torchrun can start."""

from autopar.cli import command

command()
