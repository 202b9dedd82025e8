"""A copy of this process in which a backward may run."""

from __future__ import annotations

import ctypes
import os
import warnings

import torch


def fork() -> int:
    """``os.fork``; under builds of torch for GPUs without the handlers that libraries have set for it, where the C
    library has ``_Fork`` (POSIX 2024).

    Such builds set a handler as soon as a backward has run: every backward in a copy would be refused, since the
    engine's threads of the GPUs are not copied. A copy computes on the CPU, in its own thread alone: it has none of the
    pool that this process may have computed with, and would wait for it for ever.
    """
    child = _fork()
    if child == 0:
        torch.set_num_threads(1)
    return child


def _fork() -> int:
    try:
        built_for_gpus = any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
        copy = ctypes.PyDLL(None)["_Fork"] if built_for_gpus else None
    except AttributeError:
        copy = None
    if copy is None:
        with warnings.catch_warnings():
            # Python warns of threads that a fork does not copy. The copy starts none and waits for none.
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    child: int = copy()
    if child == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return child
