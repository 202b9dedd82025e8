"""``python -m autopar``, which torchrun can start."""

from autopar.cli.main import command

command()
