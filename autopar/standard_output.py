"""Standard output for what a program reads, and nothing else."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from autopar.ir.rules import MissingRuleWarning


@contextmanager
def reserved_output() -> Iterator[TextIO]:
    """Redirect other writes to standard output, in Python or in C, to standard error; yields the real one.

    A model's file may print, and so may the libraries that it imports. Their warnings are left out; what this package
    has to say of the model stays.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", MissingRuleWarning)
        disabled = logging.root.manager.disable
        logging.disable(max(disabled, logging.WARNING))
        real = sys.stdout
        sys.stdout = sys.stderr
        try:
            with _reserved_descriptor(real) as stream:
                yield stream
        finally:
            sys.stdout = real
            logging.disable(disabled)


@contextmanager
def _reserved_descriptor(real: TextIO) -> Iterator[TextIO]:
    """A stream to where ``real`` leads, whose file descriptor leads to standard error meanwhile, if it has one."""
    real.flush()
    try:
        descriptor, error = real.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, io.UnsupportedOperation):
        yield real
        return
    saved = os.dup(descriptor)
    try:
        os.dup2(error, descriptor)
        with os.fdopen(saved, "w", encoding=real.encoding, closefd=False) as stream:
            yield stream
    finally:
        # What C code has buffered belongs to the descriptor as it is now.
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, descriptor)
        os.close(saved)
